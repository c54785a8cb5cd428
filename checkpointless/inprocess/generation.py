"""The generation that a rank is in, as its agent announced it at the barrier, and where training stands in it."""

from __future__ import annotations

import gc
import os
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from checkpointless.inprocess.communicators.process_groups import process_groups
from checkpointless.inprocess.memory import memory_status
from checkpointless.launcher.protocol.board import Board
from checkpointless.launcher.protocol.messages import Go
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import Edge, EventLog
from checkpointless.system.environment import LOCAL_RANK_ENV, own_rank, own_world_size


@dataclass
class Generation:
    """The generation that this rank is in, one object in a process.

    ``incident`` led to it, or ends it; ``high_water``: the highest optimizer step that any rank has committed (-1);
    ``origin``: the generation that began from nothing.
    """

    number: int
    incident: str | None = None
    high_water: int = -1
    origin: int = 0

    def adopt(self, go: Go) -> None:
        """Take over what the agent says of the generation that begins."""
        self.number, self.incident = go.generation, go.incident
        self.high_water, self.origin = go.high_water, go.origin

    def emit(self, stage: EventName, edge: Edge, **fields: Any) -> None:
        """Write an event of this generation and incident."""
        EventLog.here().emit(stage, edge, generation=self.number, incident=self.incident, **fields)

    def span(self, stage: EventName, **fields: Any) -> AbstractContextManager[dict[str, Any]]:
        """Return a span of ``stage``, of this generation and incident, for a ``with`` statement."""
        return EventLog.here().span(stage, generation=self.number, incident=self.incident, **fields)


@dataclass(frozen=True)
class HPState:
    """A rank's place in the job while it restarts.

    Attributes:
        rank: global rank.
        world_size: number of ranks in the job.
        local_rank: rank within this node.
        generation: the generation that is over.
        incident: id of the incident being handled, or None.
    """

    rank: int
    world_size: int
    local_rank: int
    generation: int
    incident: str | None = None

    @classmethod
    def from_environment(cls, generation: int, incident: str | None = None) -> HPState:
        """Create the state from torchrun's environment variables (a lone process is rank 0 of 1)."""
        return cls(
            rank=own_rank(),
            world_size=own_world_size(),
            local_rank=int(os.environ.get(LOCAL_RANK_ENV, "0")),
            generation=generation,
            incident=incident,
        )


_SETTLED_STEPS = 2  # after this many steps, everything that the previous generation held has been released


class StepTracker:
    """Reports how far training has come: on the rank's board (if any) for its agent, and in the event log.

    ``making``: the step in progress (-1); ``loss``: its own, if recorded. Since the block's entry: ``since_entry``
    committed steps, ``loops`` of loops of one's own; ``has_begun`` a step; ``recovers`` the state.
    """

    def __init__(self, generation: Generation, board: Board | None) -> None:
        self.making = -1
        self.loss: float | None = None
        self.since_entry = 0
        self.loops = 0
        self.has_begun = self.recovers = False
        self._generation = generation
        self._board = board
        self._open_stage: tuple[EventName, float] | None = None  # its name, and when it began
        self._ended_s: float | None = None  # when the newest step was over, if the training may be so as well

    def enter(self) -> None:
        """Count from zero, because the block is about to be entered."""
        self.since_entry = self.loops = 0
        self.has_begun = self.recovers = False
        self._begin_stage(EventName.ENTER)

    def entered(self) -> None:
        """Report that the block is entered and has come to what has a stage of its own: groups, or data."""
        if self._open_stage is not None and self._open_stage[0] is EventName.ENTER:
            self._end_stage()

    def leave(self) -> None:
        """Forget the stage that is open, because the block was left."""
        self._open_stage = None

    def begin_data(self, samples_per_step: int | None = None) -> None:
        """Report that the first batch is requested, with the job's samples per step, if known."""
        self.entered()
        fields = {} if samples_per_step is None else {"samples_per_step": samples_per_step}
        self._begin_stage(EventName.DATA, **fields)

    def begin(self, step: int) -> None:
        """Report that optimizer step ``step`` begins."""
        self.making = step
        self.loss = None
        self.has_begun = True
        if self._board is not None:
            self._board.begin_step(step)
        if self._open_stage is not None:
            self.entered()
        if self._open_stage is not None:
            self._end_stage()
            self._begin_stage(EventName.FIRST_STEP, step=step)

    def end(self) -> None:
        """Report that the optimizer step in progress is complete and committed."""
        self.since_entry += 1
        self._ended_s = time.monotonic()
        if self.since_entry == _SETTLED_STEPS and self._generation.incident is not None:
            self._generation.emit(EventName.SETTLED, "point", **memory_status())
        if self._open_stage is not None:
            self._end_stage(step=self.making)
            gc.collect()  # the previous generation's trainer is part of reference cycles
            process_groups.reap()
        if self._board is not None:
            self._board.beat()

    def committed(self, step: int) -> None:
        """Report that the rank's state is the state after ``step``."""
        if self._board is not None:
            self._board.set_committed(step)

    def begin_after(self, step: int) -> None:
        """Report that training begins with the state after ``step``, or goes on with it."""
        if self._board is not None:
            self._board.begin_after(step)

    def end_training(self, step: int) -> None:
        """Report that ``step`` was the last step; what remains to be done is not training."""
        if self._board is not None:
            self._board.begin_step(step)  # a step that has begun, and is not made, was given up
        self._emit_trained(step, time.monotonic())

    def returned(self) -> None:
        """Report that the block has returned: its newest step was the last one, if nothing has said so."""
        if self._ended_s is not None:
            self._emit_trained(self.making, self._ended_s)

    def _emit_trained(self, step: int, at_s: float) -> None:
        self._ended_s, since_s = None, time.monotonic() - at_s
        number = self._generation.number
        EventLog.here().emit(EventName.TRAINED, "point", generation=number, step=step, before_s=round(since_s, 3))

    def _begin_stage(self, stage: EventName, **fields: Any) -> None:
        self._open_stage = (stage, time.monotonic())
        self._generation.emit(stage, "begin", **fields)

    def _end_stage(self, **fields: Any) -> None:
        if self._open_stage is not None:
            stage, began_s = self._open_stage
            self._open_stage = None
            self._generation.emit(stage, "end", seconds=time.monotonic() - began_s, **fields)
