"""Make all-reduces under an ``HPWrapper`` with parts of one's own; rank 1 raises in step 3 of generation 0.

The argument names the part: ``finalize`` is a clean-up that does nothing; ``abort``, ``clean-up`` and ``health``
hang on rank 0, once; with ``device`` there seems to be a GPU, which hangs so. With ``kill`` and ``raise`` rank 1 is
lost in that way, in place of its error, between saying where it listens and connecting to its peers.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from checkpointless.inprocess import HPCallWrapper, HPWrapper

WHAT = sys.argv[1]
IS_LOST = WHAT in ("kill", "raise")
RANK = int(os.environ["RANK"])
cuda: Any = torch.cuda  # Any: its functions are replaced
SEEN = Path(os.environ["CHECKPOINTLESS_RUN_DIR"]) / "hung"


class Part:
    """Whatever it is called with, it does nothing, or hangs on rank 0 the first time."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *_: object) -> None:
        if self.name == WHAT and RANK == 0 and not SEEN.exists():
            SEEN.touch()
            time.sleep(60)


class LastWords(dist.Store):
    """Stands in for a store: its rank is lost when it asks for the first address, after it told its own."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def wait(self, *_: object) -> None:
        """Lose this rank when its peers have come to wait for its connection."""
        time.sleep(1)
        if WHAT == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("lost while the group was made")


parts: dict[str, Any] = {}
if WHAT == "abort":
    from checkpointless.inprocess import CheckpointlessAbortManager, Compose

    default = CheckpointlessAbortManager.get_default_checkpointless_abort()
    parts = {"abort": Compose(*default.instances, Part("abort"))}
if WHAT in ("finalize", "clean-up"):
    parts = {"finalize": Part("clean-up")}
if WHAT == "device":
    cuda.synchronize = Part("device")
    cuda.reset_peak_memory_stats = Part("nothing")
    parts = {"health_check": lambda *_: setattr(cuda, "is_initialized", lambda: False)}  # that is undone
if WHAT == "health":
    parts = {"health_check": Part("health")}


@HPWrapper(abort_timeout=20.0 if IS_LOST else 1.0, **parts)
def main(cfg: str, caller: HPCallWrapper | None = None) -> None:
    assert caller is not None
    if IS_LOST and caller.generation == 0:
        store, rank, size = next(dist.rendezvous("env://"))
        dist.init_process_group("gloo", store=LastWords(store) if RANK == 1 else store, rank=rank, world_size=size)
    else:
        dist.init_process_group("gloo")
    pair = dist.new_group([0, 1])
    for step in range(1, 6):
        caller.begin_step(step)
        if WHAT == "device" and step == 2 and caller.generation == 0:  # before what rank 1 waits for in that step
            cuda.is_initialized = lambda: True
        if RANK == 1 and step == 3 and caller.generation == 0:
            raise ValueError("the loss is not a number")
        total = torch.tensor([float(step)])
        dist.all_reduce(total)
        assert total.item() == step * dist.get_world_size()
        if RANK < 2:
            dist.all_reduce(total, group=pair)
        caller.end_step()
    dist.barrier()
    print(
        f"rank {RANK} done in generation {caller.generation}, incarnation", os.environ["CHECKPOINTLESS_INCARNATION"]
    )


main("cfg", None)
