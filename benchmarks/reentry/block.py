"""The block that both sides execute again after a fault: no framework but torch and gloo."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from enum import Enum

import torch
import torch.distributed as dist

from benchmarks.common import Marks

VICTIM = 2
_SETTLE_S = 2.0  # what every rank needs to be in its collective, or asleep
_SLEEP_S = 0.01


class Fault(Enum):
    """What happens to the victim."""

    EXCEPTION = "exception"
    KILLED = "killed"


class Peers(Enum):
    """What the others do meanwhile."""

    ASLEEP = "asleep"  # polling in Python
    BLOCKED = "blocked"  # in a gloo all_reduce


def block(connect: Callable[[], None], generation: int, marks: Marks, fault: Fault, peers: Peers) -> None:
    """Fail in generation 0; in the next one show that the ranks can talk to each other again.

    Args:
        connect: makes the process group.
        generation: 0 at the first entry.
        marks: gets ``entry``, ``fault`` and ``collective``.
        fault: what happens to the victim.
        peers: what the others do meanwhile.

    Raises:
        RuntimeError: the fault.
    """
    marks.write("entry", generation=generation)
    connect()
    dist.all_reduce(torch.ones(1))
    marks.write("collective", generation=generation, world_size=dist.get_world_size())
    if generation > 0:
        return
    if marks.rank == VICTIM:
        for _ in range(round(_SETTLE_S / _SLEEP_S)):
            time.sleep(_SLEEP_S)
        marks.write("fault", generation=generation)
        if fault is Fault.KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("a fault, on purpose")
    if peers is Peers.BLOCKED:
        dist.all_reduce(torch.ones(1))
    while True:
        time.sleep(_SLEEP_S)
