"""Provide graphs of the test device, which hold the communicators whose collectives they have captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from megatron.core import parallel_state

from tests.device.communicator import Communicator
from tests.device.device import Device


def graph_class(device: Device) -> type:

    class Graph:
        """Represents a graph; it captures sums over all ranks of a group, and nothing else."""

        def __init__(self) -> None:
            self._calls: list[Callable[[], object]] = []
            self._communicators: list[Communicator] = []

        def capture_begin(self, *args: Any, **options: Any) -> None:
            device.capture = self.capture

        def capture(self, communicator: Communicator, call: Callable[[], object]) -> None:
            """Take a collective of ``communicator``, which ``call`` does."""
            self._calls.append(call)
            self._communicators.append(communicator)
            communicator.graphs += 1

        def capture_end(self) -> None:
            device.capture = None

        def replay(self) -> None:
            for call in self._calls:
                call()

        def reset(self) -> None:
            for communicator in self._communicators:
                communicator.graphs -= 1
            self._calls, self._communicators = [], []

        def __del__(self) -> None:
            self.reset()

    return Graph


class ReplaysGraph(Callback):
    """Captures a sum over the data-parallel ranks, and replays it before every step, as a model would."""

    def __init__(self) -> None:
        self._graph: Any = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        group = parallel_state.get_data_parallel_group()
        if self._graph is None:
            self._summed = torch.zeros(1)
            self._graph = torch.cuda.CUDAGraph()
            self._graph.capture_begin()
            dist.all_reduce(self._summed, group=group)
            self._graph.capture_end()
        self._summed.fill_(trainer.global_step)
        self._graph.replay()
        if self._summed.item() != trainer.global_step * group.size():
            raise AssertionError(f"a replay summed to {self._summed.item()} at step {trainer.global_step}")
