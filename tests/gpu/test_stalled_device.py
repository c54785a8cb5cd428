"""Test with a device that stalls: each wait of a restart keeps its limit, and no other thread is held up."""

from __future__ import annotations

import pytest
import torch

from checkpointless.inprocess.wrap import REPLACED_EXIT_CODE
from tests.gpu.isolated import Record, end, note, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

BODIES = "tests.gpu.single"


def test_the_health_check_keeps_its_limit(record_property: Record) -> None:
    found = run(f"{BODIES}:health", 60.0, bound_s=2.0)
    record_property("seconds", found["took_s"])
    assert found["said"] == "cuda:0 did not synchronize within 2 s"
    assert 2.0 <= found["took_s"] < 4.0


def test_a_block_that_is_left_with_a_stalled_device_has_its_process_replaced(record_property: Record) -> None:
    (ended,) = end(f"{BODIES}:block", 90.0, arguments={"bound_s": 3.0, "stall_s": 40.0})
    record_property("seconds to the end of the process", ended.seconds)
    assert ended.code == REPLACED_EXIT_CODE, ended.log
    assert "the device's work did not end within 3 s" in ended.log


@pytest.mark.parametrize("what", ["synchronize", "digest", "garbage", "item"])
def test_a_limit_is_noticed_while_the_main_thread_waits_for_the_device(what: str, record_property: Record) -> None:
    found = run(f"{BODIES}:waits", 60.0, what=what, bound_s=2.0, stall_s=8.0)
    note(record_property, found)
    assert found["took_s"] < 12.0
    if found["took_s"] > 2.0:  # it waited: then its limit has to end it in time
        assert 2.0 <= found["noticed_s"] < 3.0, "the interpreter lock was held"
