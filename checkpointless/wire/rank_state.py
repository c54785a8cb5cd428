"""Where a rank stands, as its agent and the coordinator see it."""

from __future__ import annotations

from enum import Enum


class RankState(Enum):
    """The state of a rank."""

    STARTING = "starting"  # its process was started but has not said hello
    READY = "ready"  # at the barrier
    RUNNING = "running"  # in its block
    LEAVING = "leaving"  # was told of a fault and is not at the barrier yet
    DONE = "done"  # its block has returned
    FINISHED = "finished"  # every rank's block has returned
    GONE = "gone"  # its process has ended


IN_BLOCK = (RankState.RUNNING, RankState.DONE)

COUNTED = (RankState.READY, *IN_BLOCK, RankState.LEAVING)  # the end of their process is a fault
