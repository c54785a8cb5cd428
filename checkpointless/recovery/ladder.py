"""The rung between living replicas and storage: every rank is filled from a copy of one step that a tier has."""

from __future__ import annotations

import logging

import torch

from checkpointless.inprocess import active_call_wrapper
from checkpointless.inprocess.context import own_board, span
from checkpointless.inprocess.parameter_update_lock import CommitState
from checkpointless.recovery.held_state import HeldState
from checkpointless.recovery.live_state import LiveState
from checkpointless.recovery.moment import Stage
from checkpointless.recovery.own.state import OwnState
from checkpointless.recovery.rng import RngStates
from checkpointless.recovery.tiers.copies import Copies
from checkpointless.recovery.tiers.retrieval import retrieve
from checkpointless.recovery.tiers.snapshot import Snapshot
from checkpointless.telemetry.event_names import LIVING, EventName

logger = logging.getLogger(__name__)

#: The moment after a step at which copies are made: the first one, so that a finished step is soon copied.
COPIED_AT = Stage.COMMITTED


def snapshot_of(live: LiveState, own: OwnState, step: int, fit: int, offset: int) -> Snapshot | None:
    """Return the state of this rank after ``step``, its tensors as they live; None if it has no such moment.

    Args:
        live: the state, right after the update.
        own: what is this rank's own.
        step: the optimizer step.
        fit: the fit of the block, counted from 1.
        offset: how many steps of the job precede that fit.
    """
    moment, streams = live.moments(step).get(COPIED_AT), own.streams.at(step).get(COPIED_AT)
    if moment is None or streams is None:
        return None
    start = own.streams.data_start()
    before = own.streams.newest(step - 1)
    return Snapshot(
        step=step,
        stage=COPIED_AT,
        fit=fit,
        offset=offset,
        tensors=live.essentials(),
        moment=moment,
        streams=streams.to_bytes(),
        streams_before=before.to_bytes() if before is not None else None,
        data_start=start.to_bytes() if start is not None else None,
        own_buffers=own.buffers.record(step, COPIED_AT, own_board()),
    )


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
    call = active_call_wrapper()
    whole = held is not None and not held.commit.torn and COPIED_AT in held.moments
    living = held.commit.committed if whole and held is not None else None
    with span(EventName.COPIES, why=refusal) as fields:
        found = retrieve(copies, living, call.facts if call is not None else None)
        choice = found.choice
        if choice.save is None:
            fields.update(reason=choice.reason)
            return None, choice.reason
        mine = next(copy for copy in choice.copies if copy.part.part == torch.distributed.get_rank())
        lost = max(0, (call.high_water if call is not None else choice.save.iteration) - choice.save.iteration)
        fields.update(
            step=choice.save.iteration, tier=mine.tier, holder=mine.holder, bytes=found.nbytes, steps_lost=lost
        )
    if mine.tier != LIVING:
        logger.warning(
            "after step %d, from %s of rank %d: %s", choice.save.iteration, mine.tier, mine.holder, refusal
        )
    return found.snapshot, ""


def hold_snapshot(snapshot: Snapshot, own: OwnState) -> HeldState:
    """Return the state of a copy as one that this rank holds, and keep what is the rank's own.

    Args:
        snapshot: the copy, which nobody else uses.
        own: what is this rank's own; its streams of other steps are forgotten, but not which buffers differ.
    """
    moment = snapshot.step, snapshot.stage
    own.streams.forget()
    if snapshot.streams_before is not None:
        own.streams.keep(snapshot.step - 1, RngStates.from_bytes(snapshot.streams_before))
    own.streams.keep(snapshot.step, RngStates.from_bytes(snapshot.streams))
    if snapshot.data_start is not None:
        own.streams.keep_data_start(RngStates.from_bytes(snapshot.data_start))
    if snapshot.own_buffers is not None:
        own.buffers.keep_record(*moment, snapshot.own_buffers, own_board())
    return HeldState(
        CommitState(snapshot.step, ready=False, torn=False),
        dict(snapshot.tensors),
        {snapshot.stage: snapshot.moment},
        fit=snapshot.fit,
        offset=snapshot.offset,
        buffers={moment: snapshot.moment.buffers},
    )
