"""Test what is said of replicas that Lightning's ranks cannot be divided into."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy

from checkpointless.inprocess import UnrecoverableError
from checkpointless.strategies import CheckpointlessModelParallelStrategy

pytestmark = pytest.mark.nemo


def test_lightnings_default_sizes_leave_no_ranks_for_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy: Any = CheckpointlessModelParallelStrategy(replicas=2)
    monkeypatch.setattr(ModelParallelStrategy, "setup_environment", lambda _: None)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    one = SimpleNamespace(size=lambda: 1)
    strategy._device_mesh = {"data_parallel": one, "tensor_parallel": one}  # one node, no sizes given
    with pytest.raises(UnrecoverableError, match="data_parallel_size=4 and tensor_parallel_size=1"):
        strategy.setup_environment()
