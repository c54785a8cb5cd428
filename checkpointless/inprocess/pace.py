"""What a rank does by itself in each step, apart from waits for others: the agent reads it from the board.

A step goes from one vote to the next. All ranks' take equally long; what each did by itself says who holds up
others. Waits in Python are left out. Those of DDP's backward pass are in C++, so work ends with the gradient of its
first parameter, which comes about last; on GPUs events measure it, which the vote has completed. Without DDP it is
what the host does.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable
from weakref import WeakSet

import torch

from checkpointless.faults.spec import FaultPhase
from checkpointless.inprocess.communicators.waits import waited
from checkpointless.launcher.protocol.board import Board


class StepPace:
    """Measures the steps of this rank, and writes what each took to the board (None: nothing is measured)."""

    def __init__(self, board: Board | None) -> None:
        self._board = board
        self._watched: WeakSet[torch.nn.Module] = WeakSet()
        self.restart()

    def restart(self) -> None:
        """Forget the step in progress, because the block is about to be entered."""
        self._since: tuple[float, float] | None = None  # the newest vote's end, and the seconds waited until then
        self._until: tuple[float, float] | None = None  # the same of the newest gradient of a first parameter
        self._fetching_since_s: float | None = None
        self._own_s = self._data_s = 0.0
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._is_timed = False  # on the device, in the step in progress

    def begin(self, modules: Iterable[torch.nn.Module], wrappers: Iterable[torch.nn.Module]) -> None:
        """Begin a training of ``modules``, with DDP's ``wrappers``; ranks with equal parameters do equal work."""
        if self._board is None:
            return
        named = [(name, *each.shape) for module in modules for name, each in module.named_parameters()]
        self._board.set_role(zlib.crc32(repr(named).encode()))
        for each in wrappers:
            first = next((part for part in each.parameters() if part.requires_grad), None)
            if each not in self._watched and first is not None:
                self._watched.add(each)
                first.register_hook(lambda _: self.has_gradients())

    def enter(self, phase: str) -> None:
        """Note that a phase of the step begins, as fault specs name it."""
        if self._board is None:
            return
        if phase == FaultPhase.DATA.value:
            self.fetches()
        elif phase == FaultPhase.FORWARD.value:
            self.computes()
        elif phase == FaultPhase.BEFORE_OPTIMIZER.value:
            self._votes()
        elif phase == FaultPhase.OPTIMIZER.value:
            self._has_voted(self._board)

    def fetches(self) -> None:
        if self._fetching_since_s is None:
            self._fetching_since_s = time.perf_counter() - waited.seconds

    def computes(self) -> None:
        if self._fetching_since_s is not None:
            self._data_s += time.perf_counter() - waited.seconds - self._fetching_since_s
            self._fetching_since_s = None

    def has_gradients(self) -> None:
        """Note that the gradient of a first parameter is there, after which a backward pass may wait for others."""
        self._until = time.perf_counter(), waited.seconds
        if self._events is not None and not torch.cuda.is_current_stream_capturing():
            self._events[1].record()
            self._is_timed = True

    def _votes(self) -> None:
        until_s, waited_s = self._until or (time.perf_counter(), waited.seconds)
        since_s, waited_before_s = self._since or (until_s, waited_s)
        self._own_s = max(0.0, until_s - since_s - (waited_s - waited_before_s))

    def _has_voted(self, board: Board) -> None:
        if self._is_timed and self._events is not None and self._events[1].query():
            self._own_s = max(self._own_s, self._events[0].elapsed_time(self._events[1]) / 1000)
        if self._since is not None:
            board.add_pace(self._own_s, self._data_s)
        self._since, self._until = (time.perf_counter(), waited.seconds), None
        self._data_s, self._fetching_since_s, self._is_timed = 0.0, None, False
        if self._watched and torch.cuda.is_initialized():
            if self._events is None:
                self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._events[0].record()
