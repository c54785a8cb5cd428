"""Provide defects of the recovery that a user's run must show; a guarantee forbids each of them."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any
from unittest import mock

DEFECT_ENV = "CHECKPOINTLESS_TEST_DEFECT"
_BOUNDARY = "checkpointless.integrations.lightning.boundary"
_METRICS = f"{_BOUNDARY}.epoch_metrics.Accumulated"
_PEERS_BUFFERS = "checkpointless.state.rank_local.state.RankLocalState.put_buffers"
_LOGGED_BEFORE = f"{_BOUNDARY}.step_keeper.Restoration._put_back_what_was_before"
_COUNTING = "checkpointless.integrations.lightning.data.loaders._go_on_counting"
#: What each of these defects puts something else in the place of, and what.
_REPLACED: dict[str, tuple[str, Any]] = {
    # a rank that was filled keeps the buffers that it was sent
    "buffers_are_a_peers": (_PEERS_BUFFERS, lambda *args: None),
    "attributes_are_a_step_ahead": (f"{_BOUNDARY}.plain_attributes._Part.put", lambda part, values: None),
    # the block is entered again with random streams that it has drawn from before
    "entry_streams_are_stale": ("checkpointless.inprocess.wrap._Entry.restore_streams", lambda entry: None),
    "accumulated_metrics_begin_anew": (f"{_METRICS}.put", staticmethod(lambda trainer, kept: None)),
    # a new process goes on with what a peer has accumulated
    "accumulated_metrics_are_a_peers": (f"{_METRICS}.with_own", staticmethod(lambda kept, own: kept)),
    # a step that is gone through again logs only what follows its update
    "what_a_step_has_logged_is_lost": (_LOGGED_BEFORE, lambda restoration: None),
    # the first batch after a recovery has number 0
    "batches_are_counted_anew": (_COUNTING, lambda fetcher, position: None),
}


def buffers_are_not_taken_back() -> None:
    from checkpointless.state.held_state import HeldState

    original = HeldState.go_back_to

    def go_back_to(held: HeldState, stage: Any) -> dict[str, Any]:
        held.moments = {at: dataclasses.replace(moment, buffers={}) for at, moment in held.moments.items()}
        return original(held, stage)

    HeldState.go_back_to = go_back_to  # type: ignore[method-assign, assignment]


def callbacks_are_a_step_ahead() -> None:
    """Keep the state of callbacks that the fault found: no attributes and no checkpoint's states are put back."""
    from lightning.pytorch.trainer import call

    from checkpointless.state.journal import StepJournal

    install("attributes_are_a_step_ahead")
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


def install(name: str | None = None) -> None:
    """Install a defect, the one that the environment names if none is given, once for a process."""
    name = name or os.environ.pop(DEFECT_ENV, "")
    if name in _REPLACED:
        mock.patch(*_REPLACED[name]).start()
    elif name:
        globals()[name]()
