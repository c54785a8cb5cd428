"""The state of a rank on its way from a process to its successor, in the memory of the node.

A process that cannot enter its block again writes what it holds into a part file (as local checkpoints are) in a
folder of shared memory that the agent has made for this user only. The successor reads it, compares every digest,
and holds the state as if it had lived through the fault: the ranks decide on it like on any other. Nothing is
unpickled. The file stays until training goes on, so that a further process of the rank finds it, too.

The level between living replicas and storage: every rank is filled from a copy of one step that a tier has.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from checkpointless.inprocess import active_call_wrapper
from checkpointless.inprocess.exceptions import line_of
from checkpointless.inprocess.memory import free_host_memory
from checkpointless.inprocess.wrap import span
from checkpointless.observability.telemetry.event_names import LIVING, EventName
from checkpointless.observability.telemetry.wording import size
from checkpointless.replication.directory import DirectoryStore
from checkpointless.replication.parts import Part, PartError, PartId, SaveId
from checkpointless.replication.retrieval import Choice, Search, bring, choose
from checkpointless.replication.tiers.copies import Copies
from checkpointless.replication.tiers.snapshot import COPIED_AT, RankLocal, Snapshot
from checkpointless.state.held_state import HeldState
from checkpointless.state.rank_local.state import RankLocalState
from checkpointless.system.environment import HANDOVER_ENV, LOCAL_WORLD_SIZE_ENV, own_rank, own_world_size

logger = logging.getLogger(__name__)


def take_copies(copies: Copies, held: HeldState | None, refusal: str) -> tuple[Snapshot | None, str]:
    """Find the newest step of which living ranks and tiers have all states, and get this rank's. Collective.

    Args:
        held: the state that this rank holds; None: it holds none.
        refusal: why the living ranks alone cannot give the state back.

    Returns:
        This rank's state, or None if it is the one that the rank holds; and why there is no such step ("" if there
        is one).

    Raises:
        UnrecoverableError: a tier cannot be used on some rank.
        TransferError: a copy arrived damaged and could not be mended.
    """
    call, rank = active_call_wrapper(), dist.get_rank()
    with span(EventName.COPIES, why=refusal) as fields:
        lineage = copies.agree(call.facts if call is not None else None)
        copies.open()
        whole = held is not None and not held.commit.torn and COPIED_AT in held.moments
        living = lineage.save(held.commit.committed) if whole and held is not None else None
        search = Search(
            copies.stores,
            dist.get_world_size(),
            lambda copy, is_own: copy.read(is_shared=not is_own),
            {LIVING: [] if living is None else [PartId(living, rank)]},
        )
        tiers = [tier.name for tier in copies.tiers]
        choice, read = search.read(
            lambda unusable: choose(search.holdings, [LIVING, *tiers], lineage.has, unusable)
        )
        if choice.save is None:
            reason = _why(choice, tiers)
            fields.update(reason=reason)
            return None, reason
        content, nbytes = bring(choice, read)
        mine, step = choice.copies[rank], choice.save.iteration
        lost = max(0, (call.high_water if call is not None else step) - step)
        fields.update(step=step, tier=mine.place, holder=mine.holder, bytes=nbytes, steps_lost=lost)
    if mine.place != LIVING:
        logger.warning("after step %d, from %s of rank %d: %s", step, mine.place, mine.holder, refusal)
    return None if content is None else Snapshot.of(content), ""


def _why(choice: Choice, tiers: list[str]) -> str:
    """Return why there is no step of which every rank's state exists."""
    names = ", ".join(tiers)
    if not choice.lacking:
        return f"no tier ({names}) has a copy of the state"
    save, ranks = next(iter(choice.lacking.items()))
    shown = ", ".join(map(str, ranks[:8])) + (f", ... ({len(ranks)} ranks)" if len(ranks) > 8 else "")
    return f"no tier ({names}) has the state of rank{'s' * (len(ranks) > 1)} {shown} after step {save.iteration}"


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
    """Return what the process before this one has left; None, with a warning if it is damaged: it left nothing."""
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
