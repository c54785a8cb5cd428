"""What the ranks of the benchmark do: save and load one state by several strategies, and time it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from torch.distributed.checkpoint import FileSystemReader

from checkpointless.megatron.dist_checkpoint import Copies, CopiesLoadStrategy, CopiesSaveStrategy

READER_BYTES_PER_S = 100e6
LAYERS = 24
WIDTH = 2048  # 24 * 2048 * 2048 = 101 million parameters
Side = Callable[[], Any]


class SlowReader:
    """Slows torch's reader down inside this process, and counts the bytes that it reads.

    Attributes:
        nbytes: how many bytes were read since it was set to 0.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        original, reader = FileSystemReader.read_data, self

        def read_data(self: Any, plan: Any, planner: Any) -> Any:
            nbytes = sum(self.storage_data[item.storage_index].length for item in plan.items)
            reader.nbytes += nbytes
            due_s = time.monotonic() + nbytes / READER_BYTES_PER_S
            result = original(self, plan, planner)
            time.sleep(max(0.0, due_s - time.monotonic()))
            return result

        FileSystemReader.read_data = read_data  # type: ignore[method-assign]


def weights(seed: int) -> dict[str, Any]:
    """Return 101 million parameters in fp32, the same on all ranks, as views of one buffer, as Megatron's are."""
    generator = torch.Generator().manual_seed(seed)
    buffer = torch.empty(LAYERS * WIDTH * WIDTH)
    buffer.view(LAYERS, -1).copy_(torch.randn(WIDTH * WIDTH, generator=generator).expand(LAYERS, -1))
    views = buffer.view(LAYERS, WIDTH, WIDTH).unbind()
    return {
        f"{index}": ShardedTensor.from_rank_offsets(f"layers.{index}", view, replica_id=dist.get_rank())
        for index, view in enumerate(views)
    }


def moments() -> dict[str, Any]:
    """Return this rank's share of the optimizer's state: two moments, in fp32."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return {
        f"{name}.{index}": ShardedTensor.from_rank_offsets(
            f"{name}.{index}", torch.full((WIDTH // world, WIDTH), float(index)), (0, rank, world)
        )
        for name in ("exp_avg", "exp_avg_sq")
        for index in range(LAYERS)
    }


def measure_loads(root: str, repeats: int) -> dict[str, list[list[float]]]:
    """Return, by side, the seconds and the bytes read by this rank of each load of the weights."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    copies, reader, folder = Copies(), SlowReader(), Path(root) / "weights"
    folder.mkdir(exist_ok=True)
    dist.barrier()
    strategy = FullyParallelSaveStrategyWrapper(CopiesSaveStrategy(copies=copies))
    dist_checkpointing.save({"model": weights(1)}, str(folder), strategy)
    expected = weights(1)["0"].data
    sides: dict[str, Side] = {
        "plain": TorchDistLoadShardedStrategy,
        "fully parallel": lambda: FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy()),
        "copies, from storage": lambda: CopiesLoadStrategy(copies=Copies()),
        "copies, from memory": lambda: CopiesLoadStrategy(copies=copies),
        "copies, one rank's lost": lambda: CopiesLoadStrategy(copies=Copies() if dist.get_rank() == 1 else copies),
    }
    measured: dict[str, list[list[float]]] = {side: [] for side in sides}
    for _ in range(repeats):
        for side, make in sides.items():
            state, load = {"model": weights(2)}, make()
            reader.nbytes = 0
            dist.barrier()
            began_s = time.monotonic()
            loaded = dist_checkpointing.load(state, str(folder), load)
            dist.barrier()
            measured[side].append([time.monotonic() - began_s, reader.nbytes])
            assert torch.equal(loaded["model"]["0"], expected)
            del state, loaded
    end_reports()
    return measured


def measure_saves(root: str, repeats: int) -> dict[str, list[list[float]]]:
    """Return, by side, for how many seconds each save stopped this rank, and after how many it was whole."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    queue = AsyncCallsQueue()

    def ours(copies: Copies) -> Any:
        return FullyParallelSaveStrategyWrapper(CopiesSaveStrategy(copies=copies))

    def megatrons() -> Any:
        return FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy("torch_dist", 1))

    alone, with_neighbor = Copies(), Copies(replication_jump=1, replication_factor=2)  # as long as a job lasts
    sides: dict[str, tuple[Side, bool]] = {
        "Megatron, synchronous": (megatrons, False),
        "Megatron, asynchronous": (megatrons, True),
        "copies in memory": (lambda: ours(alone), True),
        "copies in memory and at a neighbor": (lambda: ours(with_neighbor), True),
    }
    state = {"model": weights(1), "optimizer": moments()}
    measured: dict[str, list[list[float]]] = {side: [] for side in sides}
    for repeat in range(repeats + 2):  # the first two, which make memory, are not counted
        for number, (side, (make, is_async)) in enumerate(sides.items()):
            strategy = make()
            folder = Path(root) / f"save-{repeat}-{number}"
            folder.mkdir(exist_ok=True)
            dist.barrier()
            began_s = time.monotonic()
            request = dist_checkpointing.save(dict(state), str(folder), strategy, async_sharded_save=is_async)
            if request is not None:
                queue.schedule_async_request(request)
            stopped_s = time.monotonic() - began_s
            queue.maybe_finalize_async_calls(blocking=True)
            if repeat > 1:
                measured[side].append([stopped_s, time.monotonic() - began_s])
            dist.barrier()
            del strategy, request
            if dist.get_rank() == 0:
                shutil.rmtree(folder)
            dist.barrier()
    end_reports()
    return measured


def end_reports() -> None:
    """End the process that Megatron's writers report to: a forked rank exits without doing so."""
    manager = getattr(filesystem_async._results_queue, "_manager", None)
    if manager is not None:
        manager.shutdown()
