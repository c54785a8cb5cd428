"""Test that random streams on a GPU come back bit for bit, with both of Megatron's trackers."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.isolated import run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.mark.parametrize("graphable", [False, True], ids=["states", "generators"])
def test_streams_are_put_back(graphable: bool) -> None:
    pytest.importorskip("megatron.core", reason="needs Megatron-core")
    found = run("tests.gpu.single:streams", 90.0, graphable=graphable)
    assert found["after"] != found["later"]
    assert found["put back"] == found["after"]
    assert found["in a fresh tracker"] == found["after"]
