"""What a manager keeps of a rank's own: its random streams and buffers, and what else no peer can give."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from checkpointless.inprocess import ParameterUpdateLock
from checkpointless.inprocess.context import own_board
from checkpointless.launcher.protocol.board import NO_STEP
from checkpointless.state.live_state import LiveState
from checkpointless.state.port import holders_of
from checkpointless.state.rank_local.agreement import require_agreement
from checkpointless.state.rank_local.state import OwnState
from checkpointless.state.rng import RngStates
from checkpointless.state.snapshot import SnapshotPoint
from checkpointless.transfer.tensor_entry import Key


class OwnStateKeeper(ABC):
    """Keeps this rank's random streams and buffers while it trains, and puts them back when training resumes.

    Args:
        own: what is kept, wherever it outlives the process.

    Attributes:
        offset: how many steps of the job precede the fit that is under way: steps are counted over all fits.
        resumed_at: the step and the stage that the last recovery resumed at; None if there was none.
    """

    def __init__(self, own: OwnState) -> None:
        self._own = own
        self.offset = 0
        self.resumed_at: tuple[int, SnapshotPoint] | None = None

    @property
    @abstractmethod
    def parameter_update_lock(self) -> ParameterUpdateLock:
        """The lock around this rank's optimizer update."""

    @property
    def rng_states(self) -> dict[tuple[int, SnapshotPoint], RngStates] | None:
        """This rank's random streams at the moments after its newest two steps; None: it has none."""
        return self._own.streams.states or None

    @rng_states.setter
    def rng_states(self, states: dict[tuple[int, SnapshotPoint], RngStates] | None) -> None:
        self._own.streams.states = states

    # --- while training ---------------------------------------------------------------------------------------

    def store_rng_states(
        self,
        step: int | None = None,
        loss: float | None = None,
        stage: SnapshotPoint = SnapshotPoint.COMMITTED,
        own: Mapping[str, Any] | None = MappingProxyType({}),
    ) -> None:
        """Keep this rank's random streams as those after ``step``, here and on its board.

        Args:
            step: the optimizer step; default: the committed step.
            loss: the loss of that step, which is kept with the streams.
            stage: the moment after the step.
            own: what else this rank alone has at that moment, as plain data that nobody changes; it is kept with
                the streams. None: it is too large to be kept.
        """
        step = self.parameter_update_lock.committed if step is None else step
        self._own.streams.capture(step, loss, stage, own)

    def own_of(self, step: int, stage: SnapshotPoint) -> Mapping[str, Any] | None:
        """Return what :meth:`store_rng_states` kept as ``own`` at ``stage`` after ``step``; None: it is lost."""
        states = self._own.streams.at(step).get(stage)
        return states.own if states is not None else None

    def begin_buffers(self, live: LiveState) -> None:
        """Begin a training with the state of ``live``: find out which buffers are a rank's own. Collective.

        Raises:
            UnrecoverableError: the ranks contradict each other about who holds the same, or it is not the same.
        """
        board, buffers = own_board(), live.copy_buffers()
        require_agreement(live, buffers)
        if board is not None:
            board.set_shard(min(live.group()))
            board.mark_buffers(NO_STEP, 0)
        self._own.buffers.begin(buffers, holders_of(live, buffers))

    def keep_buffers(self, step: int, stage: SnapshotPoint, buffers: Mapping[Key, torch.Tensor]) -> None:
        """Keep this rank's buffers as those after ``step``, here and on its board, if they may be its own.

        Call this before :meth:`store_rng_states`, so that a rank that has the streams of a moment has its buffers.

        Args:
            step: the optimizer step.
            stage: the moment after the step.
            buffers: copies of the buffers, which nobody changes.
        """
        own = self._own.buffers
        if buffers or not own.are_settled:
            own.keep(step, stage, buffers, own_board())

    def keep_data_start(self, streams: RngStates) -> None:
        """Keep ``streams``, from which a new iterator over the training data draws its order, also on the board."""
        self._own.streams.keep_data_start(streams)

    def data_start(self) -> RngStates | None:
        """Return this rank's streams as they were when the newest iterator over the training data began."""
        return self._own.streams.data_start()

    def load_rng_states(self, step: int | None = None) -> bool:
        """Put back the newest streams after ``step`` (default: the step that was resumed at).

        Returns:
            False if this rank has no streams for that step.
        """
        step = self.parameter_update_lock.committed if step is None else step
        states = self.rng_of(step)
        if states is not None:
            states.restore()
        return states is not None

    def has_moved_since(self, states: RngStates) -> tuple[bool, bool]:
        """Return whether random streams have moved, and whether declared state has changed, since ``states``."""
        return self._own.streams.have_moved(states)

    def rng_of(self, step: int) -> RngStates | None:
        """Return this rank's newest streams after ``step``, from memory or, in a new process, from the board."""
        return self._own.streams.newest(step)

    def own_digests(self, step: int) -> Mapping[str, str] | None:
        """Return digests by name of this rank's rank-local state after ``step``; None if it is not known."""
        return self._own.streams.digests(step)

    # --- when training resumes ---------------------------------------------------------------------------------

    def restore_streams(self, stage: SnapshotPoint | None = None) -> None:
        """Put back the random streams that this rank had after the step that was resumed at.

        Args:
            stage: the moment after that step; default: the moment that was resumed at.

        Raises:
            RuntimeError: the streams are not known, and it is not the start of a fit.
        """
        if self.resumed_at is None:
            return
        step, resumed = self.resumed_at
        stage = resumed if stage is None else stage
        if not self.restore_streams_of(step, stage) and step > self.offset and stage is not SnapshotPoint.LOADED:
            raise RuntimeError(f"the random streams of this rank after step {step} ({stage.name}) are not known")

    def restore_streams_of(self, step: int, stage: SnapshotPoint) -> bool:
        """Put back the random streams that this rank had at ``stage`` after ``step``.

        Returns:
            False if the streams are not known.
        """
        return self._own.streams.restore(step, stage)
