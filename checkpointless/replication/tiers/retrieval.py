"""The rung between living replicas and storage: every rank is filled from a copy of one step that a tier has."""

from __future__ import annotations

import logging

import torch.distributed as dist

from checkpointless.inprocess import active_call_wrapper
from checkpointless.inprocess.context import span
from checkpointless.observability.telemetry.event_names import LIVING, EventName
from checkpointless.replication.parts import PartId
from checkpointless.replication.retrieval import Choice, Search, bring, choose
from checkpointless.replication.tiers.copies import Copies
from checkpointless.replication.tiers.snapshot import COPIED_AT, Snapshot
from checkpointless.state.held_state import HeldState

logger = logging.getLogger(__name__)


def take_copies(copies: Copies, held: HeldState | None, refusal: str) -> tuple[Snapshot | None, str]:
    """Find the newest step of which living ranks and tiers have all states, and get this rank's. Collective.

    Args:
        copies: the tiers.
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
