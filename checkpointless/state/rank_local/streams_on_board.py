"""A rank's random streams on its board, from which a process that takes the rank's place gets them.

Streams rarely move in a step, and what was written once is not written again: the streams after a step are the
number of a snapshot which has them. Two such snapshots are kept, those of the two newest steps.
"""

from __future__ import annotations

import dataclasses

from checkpointless.launcher.protocol.board import Board
from checkpointless.state.rng import RngStates
from checkpointless.state.snapshot import SnapshotPoint

DATA_SERIES = 5  # the board's series for the streams at the start of an iterator over the training data
#: The board's series for each moment after a step. At ``COMMITTED`` snapshots have numbers, elsewhere steps.
_SERIES = {
    SnapshotPoint.COMMITTED: 0,
    SnapshotPoint.ENDED: 1,
    SnapshotPoint.CHECKED: 2,
    SnapshotPoint.TURNED: 3,
    SnapshotPoint.LOADED: 4,
    SnapshotPoint.ACCUMULATED: 7,
}
_LATER = (SnapshotPoint.ENDED, SnapshotPoint.CHECKED, SnapshotPoint.TURNED, SnapshotPoint.ACCUMULATED)


class StreamsOnBoard:
    """Writes and reads the streams of one rank.

    Args:
        board: the rank's board.
    """

    def __init__(self, board: Board) -> None:
        self.board = board
        self._written: tuple[dict[str, bytes] | None, int] = (None, max(0, *board.numbers(0)))
        self._newest = max(board.marked_steps())
        self._snapshots = {stage: board.numbers(_SERIES[stage]) for stage in _SERIES}  # the steps that have one
        self._clears = board.clears

    def put(self, step: int, states: RngStates, after_the_step: RngStates | None) -> None:
        """Keep ``states`` as the streams after ``step``.

        Args:
            step: the optimizer step.
            states: the streams after that step.
            after_the_step: the streams that are kept for that step at ``COMMITTED``, if any: often nothing is drawn
                between ``COMMITTED`` and later moments.
        """
        board, stage = self.board, states.stage
        if stage is SnapshotPoint.COMMITTED:
            if step <= self._newest:  # it is made again, and what followed it is void
                for later in _LATER:
                    board.drop_snapshot(step, _SERIES[later])
                    board.drop_moment(step, _SERIES[later])
            self._newest = step
            streams, number = self._written
            if states.streams is not streams or states.own != {} or board.clears != self._clears:
                number = self._write(step, states)
            board.mark_streams(step, number, states.loss)
        elif after_the_step is None or not states.same_streams(after_the_step):
            self._snapshots[stage] = step, step - 1
            board.put_parts(step, *states.to_parts(), _SERIES[stage])
        elif states.own == {}:
            if step in self._snapshots[stage]:  # of this moment, when it was reached before
                board.drop_snapshot(step, _SERIES[stage])
            board.mark_moment(step, _SERIES[stage])
        else:
            self._snapshots[stage] = step, step - 1
            board.put_snapshot(step, dataclasses.replace(states, streams={}).to_bytes(), _SERIES[stage])

    def _write(self, step: int, states: RngStates) -> int:
        """Write a numbered snapshot, but not over that of the step before ``step``; return its number."""
        before = self.board.streams_mark(step - 1)
        number = self._written[1] + 1
        if before is not None and before[0] % 2 == number % 2:
            number += 1
        self._written = None, number  # until it is whole
        self._clears = self.board.clears
        self.board.put_parts(number, *states.to_parts(), _SERIES[SnapshotPoint.COMMITTED])
        self._written = states.streams if states.own == {} else None, number
        return number

    def at(self, step: int) -> dict[SnapshotPoint, RngStates]:
        """Return the streams after ``step`` by stage, as far as the board has them."""
        found: dict[SnapshotPoint, RngStates] = {}
        committed = self._of(step)
        if committed is not None:
            found[SnapshotPoint.COMMITTED] = committed
        for stage in (
            SnapshotPoint.ENDED,
            SnapshotPoint.CHECKED,
            SnapshotPoint.TURNED,
            SnapshotPoint.LOADED,
            SnapshotPoint.ACCUMULATED,
        ):
            later = _decoded(self.board.snapshot(step, _SERIES[stage]))
            if later is not None and later.streams:
                found[stage] = later
            elif committed is not None and later is not None:
                found[stage] = dataclasses.replace(later, streams=committed.streams, loss=committed.loss)
            elif committed is not None and self.board.has_moment(step, _SERIES[stage]):
                found[stage] = dataclasses.replace(committed, stage=stage, own={})
        return found

    def _of(self, step: int) -> RngStates | None:
        """Return the streams right after ``step``."""
        mark = self.board.streams_mark(step)
        states = (
            _decoded(self.board.snapshot(mark[0], _SERIES[SnapshotPoint.COMMITTED])) if mark is not None else None
        )
        return dataclasses.replace(states, loss=mark[1]) if states is not None and mark is not None else None


def _decoded(snapshot: bytes | None) -> RngStates | None:
    """Return what a snapshot has; None if there is none, or the process ended while it was written."""
    try:
        return RngStates.from_bytes(snapshot) if snapshot is not None else None
    except ValueError:
        return None
