"""Test what a recovery does with the memory of a GPU: digests, adoption, offload, and how much it takes."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.isolated import Record, note, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

BODIES = "tests.gpu.single"
WIDTH, LAYERS = 4096, 12  # 200 million parameters


def test_a_digest_on_the_gpu_is_that_of_the_host() -> None:
    assert all(run(f"{BODIES}:digests", 120.0))


def test_a_held_state_is_adopted_and_nothing_of_the_old_model_stays(record_property: Record) -> None:
    found = run(f"{BODIES}:reentry", 120.0, width=WIDTH, layers=LAYERS)
    note(record_property, found)
    assert found["is_whole"]
    assert found["are_adopted"]
    assert found["left"] == pytest.approx(1.0, abs=0.02)
    assert found["peak"] < 1.7  # parameters exist twice, moments once


def test_an_offloaded_state_is_whole_in_pinned_memory(record_property: Record) -> None:
    found = run(f"{BODIES}:offload", 120.0, width=WIDTH, layers=LAYERS)
    note(record_property, found)
    assert found["is_whole"]
    assert found["is_pinned"]
