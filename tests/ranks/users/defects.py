"""Provide defects of the recovery that a user's run must show; a guarantee forbids each of them."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

DEFECT_ENV = "CHECKPOINTLESS_TEST_DEFECT"


def buffers_are_not_taken_back() -> None:
    from checkpointless.state.held_state import HeldState

    original = HeldState.go_back_to

    def go_back_to(held: HeldState, stage: Any) -> dict[str, Any]:
        held.moments = {at: dataclasses.replace(moment, buffers={}) for at, moment in held.moments.items()}
        return original(held, stage)

    HeldState.go_back_to = go_back_to  # type: ignore[method-assign, assignment]


def buffers_are_a_peers() -> None:
    """Let a rank that was filled keep the buffers that it was sent."""
    from checkpointless.state.rank_local.state import RankLocalState

    RankLocalState.put_buffers = lambda *args: None  # type: ignore[method-assign]


def attributes_are_a_step_ahead() -> None:
    from checkpointless.integrations.lightning.boundary import plain_attributes

    plain_attributes._Part.put = lambda part, values: None  # type: ignore[method-assign, assignment]


def callbacks_are_a_step_ahead() -> None:
    """Keep the state of callbacks that the fault found: no attributes and no checkpoint's states are put back."""
    from lightning.pytorch.trainer import call

    from checkpointless.state.journal import StepJournal

    attributes_are_a_step_ahead()
    original = StepJournal.snapshots

    def snapshots(journal: Any, step: int) -> Mapping[Any, Any]:
        found = original(journal, step)
        for moment in found.values():
            moment.objects["checkpoint"]["callbacks"] = call._call_callbacks_state_dict(journal.front._trainer)
        return found

    StepJournal.snapshots = snapshots  # type: ignore[method-assign, assignment]


def validations_are_repeated() -> None:
    from checkpointless.integrations.lightning.boundary.loops import _ResumableEpochLoop
    from checkpointless.state.port import SnapshotPoint

    original = _ResumableEpochLoop.on_run_start

    def on_run_start(loop: Any, data_fetcher: Any) -> None:
        if loop.resumption is not None and loop.resumption.stage is SnapshotPoint.CHECKED:
            loop.resumption.stage = SnapshotPoint.ENDED
        original(loop, data_fetcher)

    _ResumableEpochLoop.on_run_start = on_run_start  # type: ignore[method-assign, assignment]


def entry_streams_are_stale() -> None:
    """Enter the block again with random streams that it has drawn from before."""
    from checkpointless.inprocess.wrap import _Entry

    _Entry.restore_streams = lambda entry: None  # type: ignore[method-assign, assignment]


def accumulated_metrics_begin_anew() -> None:
    from checkpointless.integrations.lightning.boundary.epoch_metrics import Accumulated

    Accumulated.put = staticmethod(lambda trainer, kept: None)  # type: ignore[method-assign]


def accumulated_metrics_are_a_peers() -> None:
    """Let a new process go on with what a peer has accumulated."""
    from checkpointless.integrations.lightning.boundary.epoch_metrics import Accumulated

    Accumulated.with_own = staticmethod(lambda kept, own: kept)  # type: ignore[method-assign, assignment]


def what_a_step_has_logged_is_lost() -> None:
    """Let a step that is gone through again log only what follows its update."""
    from checkpointless.integrations.lightning.boundary.step_keeper import Restoration

    Restoration._put_back_what_was_before = lambda restoration: None  # type: ignore[method-assign, assignment]


def batches_are_counted_anew() -> None:
    """Give number 0 to the first batch after a recovery."""
    from checkpointless.integrations.lightning.data import loaders

    loaders._go_on_counting = lambda fetcher, position: None


def install() -> None:
    """Install the defect that the environment names, if any, once for a process."""
    name = os.environ.pop(DEFECT_ENV, "")
    if name:
        globals()[name]()
