"""Make a group under an ``HPWrapper``; rank 1 is lost between saying where it listens and connecting to its peers.

The argument says how: ``kill`` or ``raise``.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from checkpointless.inprocess import HPCallWrapper, HPWrapper

HOW = sys.argv[1]
RANK = int(os.environ["RANK"])


class LastWords(dist.Store):
    """Stands in for a store: its rank is lost when it asks for the first address, after it told its own."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: str) -> None:
        """Set the key in the real store."""
        self._store.set(key, value)

    def wait(self, *_: object) -> None:
        """Lose this rank when its peers have come to wait for its connection."""
        time.sleep(1)
        if HOW == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("lost while the group was made")


@HPWrapper(abort_timeout=20.0)
def main(caller: HPCallWrapper | None = None) -> None:
    assert caller is not None
    store, rank, size = next(dist.rendezvous("env://"))
    if caller.generation == 0 and RANK == 1:
        store = LastWords(store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    total = torch.ones(1)
    dist.all_reduce(total)
    print(
        f"rank {RANK} done in generation {caller.generation}, incarnation", os.environ["CHECKPOINTLESS_INCARNATION"]
    )


main()
