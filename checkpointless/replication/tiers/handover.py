"""The state of a rank on its way from a process to its successor, in the memory of the node.

A process that cannot enter its block again writes what it holds into a part file (as local checkpoints are) in a
folder of shared memory that the agent has made for this user only. The successor reads it, compares every digest,
and holds the state as if it had lived through the fault: the ranks decide on it like on any other. Nothing is
unpickled. The file stays until training goes on, so that a further process of the rank finds it, too.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from dataclasses import replace
from pathlib import Path

from checkpointless.inprocess.exceptions import line_of
from checkpointless.inprocess.memory import free_host_memory
from checkpointless.observability.telemetry.wording import size
from checkpointless.replication.directory import DirectoryStore
from checkpointless.replication.parts import Part, PartError, PartId, SaveId
from checkpointless.replication.tiers.snapshot import RankLocal, Snapshot
from checkpointless.state.rank_local.state import RankLocalState
from checkpointless.system.environment import HANDOVER_ENV, LOCAL_WORLD_SIZE_ENV, own_rank, own_world_size

logger = logging.getLogger(__name__)

_NO_FOLDER = "the agent has no folder in shared memory for it"


def hand_over(leaves: Snapshot | None, own: RankLocalState, high_water: int) -> tuple[int, str]:
    """Write what this process leaves into the memory of the node.

    Args:
        leaves: what it leaves; None: it holds nothing, and what the process before has left stays.
        own: what is this rank's own. The board, which stays, has a copy of what is small enough.
        high_water: the highest optimizer step that any rank was ever seen to commit. If this rank holds the
            gradients of that step, it makes the update first.

    Returns:
        How many bytes the successor finds (0: there is no state yet), and why it could not be done ("": it was).
    """
    root = _root()
    if root is None:
        return 0, _NO_FOLDER
    if leaves is None:
        return sum(path.stat().st_size for path in root.glob("*")), ""
    held = leaves.held
    try:
        clear()
        if held.commit.ready and held.commit.committed == high_water - 1:
            held.redo(high_water)
        if held.commit.torn:
            return 0, held.given_up or "an update failed half-way"
        streams = [(step, states) for (step, _), states in (own.streams.states or {}).items()]
        content = replace(leaves, own=RankLocal.of(own, streams, held.buffers)).content()
        lacking = _lacking_room(content.nbytes, root.parent)
        if lacking:
            return 0, lacking
        name = PartId(SaveId(max(held.commit.committed, 0), secrets.token_hex(12)), own_rank())
        DirectoryStore(root).write(Part.sealed(name, own_world_size(), content), own_rank())
    except (OSError, MemoryError, RuntimeError, ValueError, TypeError) as error:
        clear()
        return 0, line_of(error)
    return content.nbytes, ""


def take_over(own: RankLocalState) -> Snapshot | None:
    """Return what the process before this one has left; None, with a warning if it is damaged: it left nothing.

    Args:
        own: what is this rank's own, which is put back.
    """
    root, rank = _root(), own_rank()
    if root is None or not root.is_dir():
        return None
    try:
        shelf = DirectoryStore(root).shelf(own_world_size())
        for save in sorted(shelf, reverse=True):
            for file in shelf[save].get(rank, ()):
                found = Snapshot.of(file.read().content)
                found.own.put_back(own)
                return found
    except (OSError, PartError, ValueError) as error:
        logger.error("what the process before this one handed over cannot be used: %s", error)
        return None
    logger.error("what the process before this one handed over cannot be used")
    return None


def clear() -> None:
    """Remove what was handed over, because training goes on with it or without it."""
    root = _root()
    if root is not None:
        shutil.rmtree(root, ignore_errors=True)


def _root() -> Path | None:
    folder = os.environ.get(HANDOVER_ENV)
    return Path(folder) / f"rank-{own_rank()}" if folder else None


def _lacking_room(nbytes: int, folder: Path) -> str:
    """Return why ``folder`` has no room for so many bytes of each rank of the node; "" if it has."""
    about, ranks = os.statvfs(folder), int(os.environ.get(LOCAL_WORLD_SIZE_ENV, "1"))
    free = min(about.f_bavail * about.f_frsize, free_host_memory())
    if nbytes * ranks <= free:
        return ""
    return f"{size(nbytes * ranks)} are needed in {folder.parent} for the ranks of this node, {size(free)} are free"
