"""A rank's random streams at the points after its two newest steps, in its memory and on its board."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from checkpointless.inprocess.wrap import own_board
from checkpointless.launcher.protocol.board import Board
from checkpointless.state.port import SnapshotPoint
from checkpointless.state.rank_local.declared import digest_declared, is_declared, put_declared, take_declared
from checkpointless.state.rng import RngStates
from checkpointless.state.serialization.digest import digest_value

DATA_SERIES = 5  # the board's series for the streams at the start of an iterator over the training data
#: The board's series for each point after a step. At ``COMMITTED`` snapshots have numbers, elsewhere steps.
_SERIES = {
    SnapshotPoint.COMMITTED: 0,
    SnapshotPoint.ENDED: 1,
    SnapshotPoint.CHECKED: 2,
    SnapshotPoint.TURNED: 3,
    SnapshotPoint.LOADED: 4,
    SnapshotPoint.ACCUMULATED: 7,
}
_LATER = (SnapshotPoint.ENDED, SnapshotPoint.CHECKED, SnapshotPoint.TURNED, SnapshotPoint.ACCUMULATED)
_LIBRARIES = ("python", "numpy", "torch", "cuda")  # other sources keep what is no state of a step, too
RANDOM_STREAM = "random stream"  # how the names of their digests begin


class OwnStreams:
    """Keeps this rank's random streams, also where its process does not take them along when it ends.

    Attributes:
        states: the streams by step and stage; None stands for none.
    """

    def __init__(self) -> None:
        self.states: dict[tuple[int, SnapshotPoint], RngStates] | None = {}
        self._data_start: RngStates | None = None
        self._on_board: _StreamsOnBoard | None = None
        self._merged: tuple[dict[str, bytes], dict[str, bytes], dict[str, bytes]] = ({}, {}, {})

    def forget(self) -> None:
        """Forget the streams in memory, because storage gives the state."""
        self.states = {}
        self._data_start = None

    def capture(self, step: int, loss: float | None, stage: SnapshotPoint, own: Mapping[str, Any] | None) -> None:
        """Keep the streams as they are now as those at ``stage`` after ``step``.

        Args:
            loss: the loss of that step; None: the one that was kept with the step before, if any.
            own: what else this rank alone has at that point, as plain data that nobody changes. None: it is too
                large to be kept.
        """
        if loss is None:
            committed = (self.states or {}).get((step, SnapshotPoint.COMMITTED))
            known = {SnapshotPoint.COMMITTED: committed} if committed is not None else self.at(step)
            if known:
                loss = next(iter(known.values())).loss
        self.keep(step, self._with_declared(RngStates.capture(loss, stage, own)))

    def _with_declared(self, states: RngStates) -> RngStates:
        """Add declared state to random streams; the same dictionary comes of the same two."""
        declared = take_declared()
        if not declared:
            return states
        streams, known, merged = self._merged
        if streams is not states.streams or known is not declared:
            merged = {**states.streams, **declared}
            self._merged = states.streams, declared, merged
        return dataclasses.replace(states, streams=merged)

    def have_moved(self, since: RngStates) -> tuple[bool, bool]:
        """Return whether random streams have moved, and whether declared state has changed."""
        declared = {name: each for name, each in since.streams.items() if is_declared(name)}
        drawn = {name: each for name, each in since.streams.items() if name not in declared}
        return RngStates.capture().streams != drawn, take_declared() != declared

    def keep(self, step: int, states: RngStates) -> None:
        """Keep ``states`` as the streams at their stage after ``step``, and drop those of steps before the last."""
        known, stage = self.states or {}, states.stage
        if stage is SnapshotPoint.COMMITTED:  # what followed when this step was made before is void
            kept = {key: each for key, each in known.items() if key[0] >= step - 1 and key[0] != step}
        else:
            kept = {key: each for key, each in known.items() if key[0] >= step - 1}
        on_board = self._board()
        if stage is not SnapshotPoint.COMMITTED and on_board is not None and all(key[0] != step for key in kept):
            kept.update({(step, before): each for before, each in on_board.at(step).items()})  # a new process
        after_the_step = kept.get((step, SnapshotPoint.COMMITTED))
        kept[step, stage] = states
        self.states = kept  # one assignment: an interruption leaves the old or the new
        if on_board is not None:
            on_board.put(step, states, after_the_step)

    def _board(self) -> _StreamsOnBoard | None:
        """Return what this rank's board has of its streams; None: there is no board."""
        board: Board | None = own_board()
        if board is None:
            return None
        if self._on_board is None or self._on_board.board is not board:
            self._on_board = _StreamsOnBoard(board)
        return self._on_board

    def at(self, step: int) -> dict[SnapshotPoint, RngStates]:
        """Return the streams after ``step`` by stage, from memory or, in a new process, from the board."""
        known = {key[1]: states for key, states in (self.states or {}).items() if key[0] == step}
        if known:
            return known
        on_board = self._board()
        return on_board.at(step) if on_board is not None else {}

    def digests(self, step: int) -> dict[str, str] | None:
        """Return digests of declared state, and of Python's, NumPy's and torch's streams, after ``step``."""
        states = self.at(step).get(SnapshotPoint.COMMITTED)
        if states is None:
            return None
        drawn = {name: each for name, each in states.streams.items() if name in _LIBRARIES}
        digests = {f"{RANDOM_STREAM} {name}": digest_value(each) for name, each in drawn.items()}
        return {**digests, **digest_declared(states.streams)}

    def newest(self, step: int) -> RngStates | None:
        """Return the streams at the last stage after ``step`` that is known; None if none is."""
        known = self.at(step)
        return known[max(known)] if known else None

    def restore(self, step: int, stage: SnapshotPoint) -> bool:
        """Put back the streams at ``stage`` after ``step``.

        Returns:
            False if they are not known.
        """
        states = self.at(step).get(stage)
        if states is not None:
            put_declared(states.streams)
            states.restore()
        return states is not None

    def known(self) -> tuple[tuple[int, int], ...]:
        """Return the newest steps and stages whose streams are known."""
        board = own_board()
        steps = {step for step, _ in self.states or {}}
        if not steps and board is not None:
            committed = board.read().committed
            steps = {committed - 1, committed, committed + 1}
        known = {step: self.at(step) for step in sorted(steps) if step >= 0}
        return tuple((step, int(stage)) for step, streams in known.items() for stage in sorted(streams))

    def keep_data_start(self, streams: RngStates) -> None:
        """Keep ``streams``, from which a new iterator over the training data draws its order, also on the board."""
        self._data_start = streams
        board = own_board()
        if board is not None:
            board.put_snapshot(0, streams.to_bytes(), series=DATA_SERIES)

    def data_start(self) -> RngStates | None:
        """Return the streams as they were when the newest iterator over the training data began."""
        board = own_board()
        if self._data_start is None and board is not None:
            kept = board.snapshot(0, series=DATA_SERIES)
            self._data_start = RngStates.from_bytes(kept) if kept else None
        return self._data_start


# --- On the board, from which a process that takes the rank's place gets them -------------------------------------
#
# Streams rarely move in a step, and what was written once is not written again: the streams after a step are the
# number of a snapshot which has them. Two such snapshots are kept, those of the two newest steps.


class _StreamsOnBoard:
    """Writes and reads the streams of one rank."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self._written: tuple[dict[str, bytes] | None, int] = (None, max(0, *board.numbers(0)))
        self._newest = max(board.marked_steps())
        self._snapshots = {stage: board.numbers(_SERIES[stage]) for stage in _SERIES}  # the steps that have one
        self._clears = board.clears

    def put(self, step: int, states: RngStates, after_the_step: RngStates | None) -> None:
        """Keep ``states`` as the streams after ``step``.

        Args:
            states: the streams after that step.
            after_the_step: the streams that are kept for that step at ``COMMITTED``, if any: often nothing is drawn
                between ``COMMITTED`` and later points.
        """
        board, stage = self.board, states.stage
        if stage is SnapshotPoint.COMMITTED:
            if step <= self._newest:  # it is repeated, and what followed it is void
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
            if step in self._snapshots[stage]:  # of this point, when it was reached before
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
