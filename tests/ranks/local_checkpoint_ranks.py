"""Provide what the ranks of test_local_checkpoint.py do: a list of calls of the manager, on simulated nodes."""

import os
import resource
import shutil
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from checkpointless import recovery
from checkpointless.recovery import CliqueReplicationStrategy, LocalCheckpointManager, NoReplicasAvailableError
from checkpointless.replication.local_checkpoint import AsyncRequest, BasicTensorAwareStateDict, register_form
from tests.ranks.players import damage, make_calls

TOO_SMALL = 16 * 1024  # no rank's part fits
EVERY_DTYPE = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64)


def state(rank: int, iteration: int) -> dict[Any, Any]:
    """Return a state of all dtypes, shapes and keys, another one for each rank and iteration."""
    generator = torch.Generator().manual_seed(1000 * iteration + rank)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "iteration": iteration,
        "model": {"layers.0.weight": noise(100, 103), "strided": noise(16, 24).t(), "empty": torch.empty(0, 4)},
        ("optimizer", rank): [{0: {"step": torch.tensor(float(iteration))}, "0": (noise(3), (noise(2), None))}],
        "dtypes": {str(dtype): noise(7, 5).to(dtype) for dtype in EVERY_DTYPE},
        "ragged": tuple(noise(index + rank) for index in range(3)),
        "lr": 1e-3 * rank,
        7: b"bytes",
    }


def bits(tree: Any) -> Any:
    """Turn ``tree`` into something that is equal only to a tree of the same types, keys and bits."""
    if isinstance(tree, torch.Tensor):
        return str(tree.dtype), tuple(tree.shape), tree.contiguous().reshape(-1).view(torch.uint8).tolist()
    if isinstance(tree, dict):
        return "dict", [(type(key).__name__, key, bits(item)) for key, item in tree.items()]
    if isinstance(tree, (list, tuple)):
        return type(tree).__name__, [bits(item) for item in tree]
    return type(tree).__name__, repr(tree)


def play(
    root: str, calls: Sequence[Sequence[Any]], jump: int | None = 0, factor: int = 2, node_size: int = 2
) -> list[dict[str, Any]]:
    """Make calls of a :class:`Player` on nodes of ``node_size`` ranks that each have a directory in ``root``."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    if dist.get_rank() % 2:  # as where Megatron has groups of single pipeline stages: ranks know different groups
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    strategy = None if jump is None else recovery.LazyCliqueReplicationStrategy(jump, factor)
    player = Player(Path(root), Path(root) / f"node{dist.get_rank() // node_size}", strategy)
    return make_calls(player, calls, RuntimeError, ValueError)


class Writer(threading.Thread):
    def __init__(self, request: AsyncRequest) -> None:
        super().__init__(target=request.write, daemon=True)
        self.request = request
        self.start()

    def wait(self) -> None:
        self.join(60)
        assert not self.is_alive()
        self.request.execute_finalize_fns()


class Unknown(BasicTensorAwareStateDict):
    """Represents a state of a user's own class."""


class Player:
    def __init__(self, root: Path, folder: Path, strategy: recovery.ReplicationStrategy | None) -> None:
        self.root = root
        self.folder = folder
        self.strategy = strategy
        self.rank = dist.get_rank()
        self.manager = LocalCheckpointManager(folder, repl_strategy=strategy)
        self.work: Writer | None = None

    def save(self, *iterations: int) -> None:
        for iteration in iterations:
            self.manager.save(state(self.rank, iteration), iteration)

    def save_different(self) -> None:
        self.manager.save({}, 10 + self.rank)

    def save_unsafe(self, iteration: int, rank: int) -> None:
        self.manager.save({"callbacks": [object() if self.rank == rank else 0]}, iteration)

    def save_of_a_class_known_to(self, rank: int) -> None:
        if self.rank != rank:
            self.manager.save({}, 5)
            return
        register_form(Unknown, lambda own: own.state_dict, Unknown)
        self.manager.save(Unknown({"n": torch.ones(1)}), 5)

    def save_async(self, iteration: int) -> None:
        """Save, and train on at once."""
        tree = state(self.rank, iteration)
        request = self.manager.save(tree, iteration, is_async=True)
        assert request is not None
        self.work = Writer(request)
        tree["model"]["layers.0.weight"].zero_()
        tree["dtypes"].clear()

    def wait(self) -> bool:
        assert self.work is not None
        self.work.wait()
        return not self.work.is_alive()

    def find(self) -> int:
        return self.manager.find_latest()

    def load(self) -> dict[str, Any]:
        loaded, part = self.manager.load()
        iteration = loaded["iteration"]
        return {
            "iteration": iteration,
            "equal": bits(loaded) == bits(state(self.rank, iteration)),
            "own": f"part_{self.rank}" in part and f"iter_{iteration:010d}" in part,
        }

    def delete(self, *patterns: str) -> None:
        for path in self._matching(patterns):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def damage(self, *patterns: str) -> None:
        damage(self._matching(patterns))

    def swap(self, one: str, other: str) -> None:
        if self.rank == 0:
            (self.root / one).rename(self.root / "aside")
            (self.root / other).rename(self.root / one)
            (self.root / "aside").rename(self.root / other)

    def files(self, pattern: str = "*") -> list[str]:
        return sorted(str(path.relative_to(self.root)) for path in self.root.glob(f"*/{pattern}"))

    def _matching(self, patterns: Sequence[str]) -> list[Path]:
        dist.barrier()
        paths = [path for pattern in patterns for path in self.root.glob(pattern)] if self.rank == 0 else []
        assert paths or self.rank
        return paths

    def full_disk(self, rank: int) -> None:
        """From now on, ``rank`` can write no file of more than a few kilobytes."""
        if self.rank == rank:
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (TOO_SMALL, hard))

    def room_again(self) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    def renew(self, *ranks: int) -> None:
        """These ranks, or all, have new processes, which know nothing."""
        if not ranks or self.rank in ranks:
            self.manager = LocalCheckpointManager(self.folder, repl_strategy=self.strategy)

    def regroup(self) -> None:
        """Make all process groups again, as after a fault."""
        store, world_size = dist.distributed_c10d._get_default_store(), dist.get_world_size()
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("again", store),
            rank=self.rank,
            world_size=world_size,
            timeout=timedelta(seconds=20),
        )


def strategy_alone(jump: int, factor: int) -> dict[str, Any]:
    """Replicate, forget what rank 0 and 1 had, and retrieve it, without a manager."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank, world = dist.get_rank(), dist.get_world_size()
    strategy = CliqueReplicationStrategy.from_replication_params(jump, factor)
    group = strategy.local_group.group
    assert group is not None
    states, ids = strategy.replicate(state(rank, 3), f"of-{rank}")
    kept = {} if rank < 2 else dict(zip(ids, states))
    available = {each: [] if each < 2 else [f"of-{peer}" for peer in range(world)] for each in range(world)}
    wanted = [f"of-{rank}"] if rank < 2 else []
    plan = strategy.retrieve_plan(available, wanted)
    arrived = strategy.retrieve_execute(plan, kept)
    try:
        strategy.retrieve_plan(available, ["nobody's"])
        refused = ""
    except NoReplicasAvailableError as error:
        refused = str(error)
    return {
        "peers": strategy.peers,
        "ids": ids,
        "replicas": [bits(each) == bits(state(peer, 3)) for peer, each in zip(strategy.peers, states)],
        "arrived": sorted(arrived),
        "equal": all(bits(each) == bits(state(rank, 3)) for each in arrived.values()),
        "plan": [list(transfer) for transfer in plan],
        "refused": refused,
        "timeout_s": group._get_backend(torch.device("cpu")).options._timeout.total_seconds(),
    }


def one_cannot_replicate(jump: int, factor: int) -> str:
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    strategy = CliqueReplicationStrategy.from_replication_params(jump, factor)
    tree: dict[str, Any] = {"hook": print} if dist.get_rank() == 1 else {}
    try:
        strategy.replicate(tree, "any")
    except (RuntimeError, TypeError) as error:
        return str(error)
    return "nothing was raised"


def cliques_asked_for(cases: Sequence[tuple[Sequence[int], int]]) -> list[str]:
    """Ask for cliques with the jump of each rank, on nodes of some size; return the words of what was raised each
    time.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    raised = []
    for jumps, node_size in cases:
        os.environ["LOCAL_WORLD_SIZE"] = str(node_size)
        try:
            CliqueReplicationStrategy.from_replication_params(jumps[dist.get_rank()], 2)
            raised.append("nothing was raised")
        except ValueError as error:
            raised.append(str(error))
        dist.barrier()
    return raised
