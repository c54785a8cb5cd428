"""Provide what the ranks of test_dist_checkpoint.py do: save and load checkpoints by several strategies."""

import copy
import io
import logging
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from torch.distributed.checkpoint import FileSystemReader

from checkpointless.megatron import dist_checkpoint
from checkpointless.megatron.dist_checkpoint import Copies, CopiesSaveStrategy, register, unregister
from tests.ranks.local_checkpoint_ranks import bits
from tests.ranks.players import damage, make_calls

ROWS = 24  # divisible by all numbers of ranks


@dataclass(frozen=True)
class Opaque:
    """Stands for an object of a class of the user's, which only Megatron pickles."""

    value: int


def sharded(seed: int, missing: bool = False, empty: bool = False) -> dict[str, Any]:
    """Return a state with replicated, divided and opaque leaves; the same seed gives the same global state.

    It has a tensor that no other state has (``missing``), or other values, to be loaded into (``empty``).
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        value = torch.randn(*shape, generator=generator)
        return torch.zeros_like(value) if empty else value

    rows = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
    thing: dict[str, Any] = {"seed": seed, "at": noise(3), "words": ("a", b"b")}
    own = None if empty else rank * seed
    replicated = {
        "weight": ShardedTensor.from_rank_offsets("weight", noise(64, 33), replica_id=rank),
        "half": ShardedTensor.from_rank_offsets("half", noise(1000).bfloat16(), replica_id=rank),
        "scalar": ShardedTensor.from_rank_offsets("scalar", noise(1)[0], replica_id=rank),
        "strided": ShardedTensor.from_rank_offsets("strided", noise(8, 6).t().contiguous(), replica_id=rank),
    }
    if missing:
        replicated["new"] = ShardedTensor.from_rank_offsets("new", noise(2), replica_id=rank)
    return {
        "model": replicated,
        "optimizer": [
            {"exp_avg": ShardedTensor.from_rank_offsets("exp_avg", noise(ROWS, 50)[rows], (0, rank, world))},
            {
                "layers": ShardedTensor.from_rank_offsets(
                    "layers", noise(9), (0, 0, 1), replica_id=rank, prepend_axis_num=1
                )
            },
        ],
        "extra": ShardedObject("extra", None if empty else thing, (1,), (0,), replica_id=rank),
        "stream": ShardedObject("stream", io.BytesIO(b"" if empty else b"%d" % seed), (1,), (0,), replica_id=rank),
        "opaque": ShardedObject("opaque", None if empty else Opaque(seed), (1,), (0,), replica_id=rank),
        "own": ShardedObject("own", own, (world,), (rank,)),
        "common": {"lr": 0.1},
    }


def plain(state: Any) -> Any:
    """Return a state with the data of its leaves in their places."""
    if isinstance(state, ShardedTensor | ShardedObject):
        return plain(state.data)
    if isinstance(state, dict):
        return {key: plain(state[key]) for key in sorted(state)}
    if isinstance(state, list):
        return [plain(each) for each in state]
    return state.getvalue() if isinstance(state, io.BytesIO) else state


def tensors(state: dict[str, Any]) -> dict[str, Any]:
    return {"model": state["model"], "optimizer": state["optimizer"]}


class Notes(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def play(
    root: str, calls: Sequence[Sequence[Any]], factor: int = 1, disk: bool = False, memory: bool = True
) -> list[dict[str, Any]]:
    """Make calls of a :class:`Player`; ``factor`` ranks keep each part, on a disk of their own and in memory.

    Return what came of each, and what was warned of.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    folder = Path(root) / f"disk{dist.get_rank()}" if disk else None
    copies = Copies(memory=memory, disk=folder, replication_jump=1, replication_factor=factor)
    player = Player(Path(root), copies)
    outcomes = []
    for each in calls:
        player.notes.lines.clear()
        (outcome,) = make_calls(player, [each], Exception)
        outcomes.append({**outcome, "warnings": list(player.notes.lines)})
    end_reports()
    return outcomes


def end_reports() -> None:
    """End the process that Megatron's writers report to: a forked rank exits without doing so."""
    manager = getattr(filesystem_async._results_queue, "_manager", None)
    if manager is not None:
        manager.shutdown()


class Player:
    """Makes the calls; checkpoints and disks are at ``root``."""

    def __init__(self, root: Path, copies: Copies) -> None:
        self.root, self.copies = root, copies
        self.rank = dist.get_rank()
        self.queue = AsyncCallsQueue()
        self.notes = Notes()
        logging.getLogger().addHandler(self.notes)
        self.read_bytes = 0
        self._count_reads()

    def save(self, name: str, seed: int, how: str = "copies") -> None:
        self._save(name, sharded(seed), how, False)

    def save_async(self, name: str, seed: int, how: str = "copies") -> None:
        """Begin to save the state of a seed, and change what was saved at once."""
        state = sharded(seed)
        kept = copy.deepcopy(state)
        request = self._save(name, kept, how, True)
        self.queue.schedule_async_request(request)
        for leaf in (*kept["model"].values(), kept["optimizer"][0]["exp_avg"]):
            leaf.data.zero_()

    def finish(self) -> list[int]:
        return self.queue.maybe_finalize_async_calls(blocking=True)

    def is_whole(self, name: str) -> bool:
        return dist_checkpointing.check_is_distributed_checkpoint(str(self.root / name))

    def load(self, name: str, seed: int, how: str = "copies", missing: bool = False) -> dict[str, Any]:
        self.read_bytes = 0
        strategy = self._load_strategy(how)
        target = sharded(seed, missing=missing, empty=True)
        if dist.get_world_size() != self.saved_by(name):
            del target["own"]  # objects cannot be cut differently
        tensor = target["model"]["weight"].data
        loaded = dist_checkpointing.load(target, str(self.root / name), strategy)
        report = getattr(strategy, "report", None)
        return {
            "equal": bits(plain(loaded)) == bits(plain(sharded(seed))),
            "tensors": bits(plain(tensors(loaded))) == bits(plain(tensors(sharded(seed)))),
            "in_place": loaded["model"]["weight"].data_ptr() == tensor.data_ptr(),
            "read": self.read_bytes,
            "from": {} if report is None else report.nbytes,
        }

    def saved_by(self, name: str) -> int:
        return sum(
            1 for key in self._load_strategy("megatron").load_sharded_metadata(self.root / name) if "own" in key
        )

    def load_registered(self, name: str, seed: int) -> bool:
        register(self.copies)
        try:
            self._save(name, sharded(seed), "default", False)
            outcome = self.load(name, seed, "default")
        finally:
            unregister()
        return bool(outcome["equal"]) and outcome["read"] < 3000

    def metadata(self, name: str) -> list[str]:
        """Return what is known of a checkpoint, which is what Megatron's strategy knows."""
        strategy, megatrons = self._load_strategy("copies"), TorchDistLoadShardedStrategy()
        strategy.check_backend_compatibility("torch_dist")
        strategy.check_version_compatibility(1)
        assert strategy.can_handle_sharded_objects
        for method in ("load_tensors_metadata", "load_sharded_metadata"):
            ours, theirs = (getattr(each, method)(self.root / name) for each in (strategy, megatrons))
            assert ours == theirs
        return sorted(strategy.load_sharded_metadata(self.root / name))

    def forget(self, *ranks: int) -> None:
        """These ranks have new processes, which have nothing in memory."""
        if self.rank in ranks:
            self.copies = Copies(
                disk=self.copies.disk,
                replication_jump=self.copies.replication_jump,
                replication_factor=self.copies.replication_factor,
            )

    def damage(self, pattern: str) -> None:
        damage(self.root.glob(pattern) if self.rank == 0 else ())

    def damage_memory(self, rank: int, part: int) -> None:
        """Flip a bit in what a rank keeps of a part in its memory."""
        if self.rank == rank:
            store: Any = self.copies.stores["memory"]
            for id_, kept in store._parts.items():
                if id_.part == part:
                    next(each for each in kept.part.content.tensors if each.numel()).view(-1)[0].add_(1)

    def no_room(self, name: str) -> None:
        """Let rank 1 be unable to write the checkpoint: files that cannot be made are in the way."""
        folder = self.root / name
        if self.rank == 0:
            for number in range(4):
                (folder / f"__1_{number}.distcp").mkdir(parents=True)

    def rename(self, old: str, new: str) -> None:
        if self.rank == 0:
            (self.root / old).rename(self.root / new)

    def remove(self, pattern: str) -> None:
        for path in self.root.glob(pattern) if self.rank == 0 else ():
            path.unlink()

    def kill_writer(self) -> None:
        """Kill this rank's writer of the newest save, on rank 1."""
        process = self.queue.async_calls[-1].async_caller.process
        if self.rank == 1 and process is not None:
            os.kill(process.pid, signal.SIGKILL)

    def parts(self) -> list[list[int]]:
        return [
            sorted(part for parts in store.shelf(dist.get_world_size()).values() for part in parts)
            for store in self.copies.stores.values()
        ]

    def _save(self, name: str, state: dict[str, Any], how: str, is_async: bool) -> Any:
        folder = self.root / name
        folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        strategy: Any = {
            "copies": lambda: CopiesSaveStrategy(copies=self.copies),
            "parallel": lambda: FullyParallelSaveStrategyWrapper(CopiesSaveStrategy(copies=self.copies)),
            "megatron": lambda: TorchDistSaveShardedStrategy("torch_dist", 1),
            "default": lambda: None,
        }[how]()
        return dist_checkpointing.save(state, str(folder), strategy, async_sharded_save=is_async)

    def _load_strategy(self, how: str) -> Any:
        return {
            "copies": lambda: dist_checkpoint.CopiesLoadStrategy(copies=self.copies),
            "megatron": TorchDistLoadShardedStrategy,
            "default": lambda: None,
        }[how]()

    def _count_reads(self) -> None:
        original = FileSystemReader.read_data
        player = self

        def read_data(self: Any, plan: Any, planner: Any) -> Any:
            player.read_bytes += sum(self.storage_data[item.storage_index].length for item in plan.items)
            return original(self, plan, planner)

        FileSystemReader.read_data = read_data  # type: ignore[method-assign]
