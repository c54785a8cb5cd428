"""Test how the communicators of one rank are aborted, one after the other and at the same time."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.isolated import Record, note, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

COUNT = 20
STALL_S = 10.0


@pytest.mark.parametrize("stall_s", [0.0, STALL_S], ids=["idle", "stalled"])
@pytest.mark.parametrize("at_once", [False, True], ids=["one-by-one", "at-once"])
def test_twenty_communicators_are_aborted(at_once: bool, stall_s: float, record_property: Record) -> None:
    found = run("tests.gpu.nccl:aborts", 90.0, count=COUNT, at_once=at_once, stall_s=stall_s)
    note(record_property, found)
    assert found["communicators"] == COUNT + 1
    if at_once:
        assert found["aborted_s"] < stall_s + 10.0
