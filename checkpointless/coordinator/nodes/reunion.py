"""What to do with the ranks of a node that returns to its coordinator: each of the two saw only its own side."""

from __future__ import annotations

from enum import Enum

from checkpointless.wire.rank_state import IN_BLOCK, RankState

_AT_WORK = (*IN_BLOCK, RankState.LEAVING)


class Reunion(Enum):
    """What it takes to make both views of a rank agree."""

    AGREED = "nothing"
    READY = "it is at the barrier, and that was not heard"
    DONE = "its block returned, and that was not heard"
    ENDED = "its process has ended, and that was not heard"
    START = "it has to be started: the command did not arrive"
    INTERRUPT = "it has to leave its block: the command did not arrive"
    FINISH = "all are done: the command did not arrive"


def assumed(said: RankState) -> RankState:
    """Return what is known of a rank whose node was declared lost, so that the whole job has to regroup.

    Args:
        said: the rank's state as its node reports it.
    """
    if said in _AT_WORK:
        return RankState.LEAVING
    return RankState.STARTING if said is RankState.READY else said


def reunite(known: RankState, said: RankState) -> Reunion:
    """Return what to do with one rank.

    Args:
        known: the rank's state as the coordinator knows it.
        said: the rank's state as its node reports it, after everything else that the node had to report.
    """
    if known is said:
        return Reunion.AGREED
    if said is RankState.GONE:
        return Reunion.START if known is RankState.STARTING else Reunion.ENDED
    if said is RankState.READY:
        return Reunion.READY
    if known in (RankState.LEAVING, RankState.STARTING) and said in IN_BLOCK:
        return Reunion.INTERRUPT
    if known is RankState.FINISHED and said in IN_BLOCK:
        return Reunion.FINISH
    if known is RankState.RUNNING and said is RankState.DONE:
        return Reunion.DONE
    return Reunion.AGREED
