"""How a rank leaves its block after a fault: the generation is aborted once, and the main thread interrupted."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import NoReturn

import torch

from checkpointless.inprocess.communicators.process_groups import process_groups
from checkpointless.inprocess.deadline import bounded
from checkpointless.inprocess.exceptions import line_of
from checkpointless.inprocess.generation import Generation, HPState
from checkpointless.inprocess.main_thread import MainThread
from checkpointless.inprocess.parameter_update_lock import ParameterUpdateLock
from checkpointless.launcher.client import FaultNotice, RankClient
from checkpointless.launcher.protocol.messages import Answer
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.system.environment import FAULT_AT_ENV

logger = logging.getLogger(__name__)


class FaultResponder:
    """Makes the main thread leave its block when a fault notice arrives.

    Args:
        generation: the generation that this rank is in.
        client: the agent's client, which brings the notices.
        main: the main thread.
        lock: brackets the optimizer update; it is closed before anything is aborted.
        abort: the composition of aborts.
        timeout: time limit of the update in progress, of the abort, and of the main thread's way out, each.
        raise_before_abort: whether the main thread is interrupted before the abort runs rather than after it.
        replace: ends this process, which a successor takes over, with a reason.

    Attributes:
        aborted: the generation that was aborted last (-1: none).
        noticed: the newest generation that is known to be over. The block reads it without a lock, because an
            interruption could leave a lock taken.
        fault_at_s: when this rank first knew of the fault of this generation, in monotonic-clock seconds (None: it
            knows of none).
    """

    def __init__(
        self,
        generation: Generation,
        client: RankClient,
        main: MainThread,
        lock: ParameterUpdateLock,
        *,
        abort: Callable[[HPState], object],
        timeout: timedelta,
        raise_before_abort: bool,
        replace: Callable[[str], NoReturn],
    ) -> None:
        self.aborted = -1
        self.noticed = -1
        told = os.environ.pop(FAULT_AT_ENV, "")  # the time of the fault after which this process was started
        self.fault_at_s: float | None = float(told) if told else None
        self._generation = generation
        self._client = client
        self._main = main
        self._lock = lock
        self._abort_parts = abort
        self._timeout = timeout
        self._raise_before_abort = raise_before_abort
        self._replace = replace
        self._abort_mutex = threading.Lock()
        self._generation_mutex = threading.Lock()  # no fault of the old generation is handled in the new one
        self._thread: _FaultThread | None = None

    def start(self) -> None:
        """Start the thread that reacts to fault notices."""
        self._thread = _FaultThread(self._on_fault, self._replace)
        self._client.on_fault = self._on_notice

    def shutdown(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown()
        self._client.on_fault = None

    def between_generations(self) -> AbstractContextManager[bool]:
        """Return the lock under which the rank goes on to the next generation; no fault is handled meanwhile."""
        return self._generation_mutex

    def note_fault(self, undetected_s: float = 0.0) -> None:
        """Note that there is a fault; of several, the earliest counts.

        Args:
            undetected_s: for how many seconds nobody has noticed it.
        """
        at_s = time.monotonic() - undetected_s
        self.fault_at_s = at_s if self.fault_at_s is None else min(self.fault_at_s, at_s)

    def abort(self, generation: int) -> bool:
        """Abort ``generation`` once, in whichever thread comes first; the other thread waits for it.

        Returns:
            False if the update in progress did not end in time.
        """
        with self._abort_mutex:
            if self.aborted >= generation:
                return True
            with self._generation.span(EventName.ABORT):
                if not self._lock.close(self._timeout):
                    return False
                with bounded("the abort", self._timeout.total_seconds(), self._replace):
                    self._abort_parts(HPState.from_environment(generation, self._generation.incident))
            self.aborted = generation
            return True

    def adopt_incident(self) -> None:
        """Take the incident's id from the notice that has come, if one has."""
        notice = self._client.pending_fault(self._generation.number)
        if notice is not None:
            self._generation.incident = notice.incident

    def where(self, inquiry: int) -> Answer:
        """Return the answer to an inquiry of the coordinator. Runs in the thread that reads the agent."""
        in_collective, stack = self._main.where()
        return Answer(
            inquiry,
            in_collective,
            stack,
            is_async=torch.cuda.is_initialized(),
            launched=process_groups.launched(),
        )

    def _on_notice(self, notice: FaultNotice) -> None:
        """Pass a notice on to the fault thread. Runs in the thread that reads the agent."""
        self.noticed = max(self.noticed, notice.generation)
        if notice.generation < self._generation.number:
            return
        self.note_fault(notice.undetected_ms / 1000)
        if self._thread is not None:
            self._thread.notify(notice.generation)

    def _on_fault(self, generation: int) -> None:
        """Free the main thread and make sure that it leaves the block. Runs in the fault thread."""
        with self._generation_mutex:
            if generation != self._generation.number:
                return
            self.adopt_incident()
            timeout_s = self._timeout.total_seconds()
            if not self._lock.close(self._timeout):
                self._replace(f"the optimizer update did not end within {timeout_s:.0f} s")
            if self._raise_before_abort:
                self._main.interrupt()
            left = self.abort(generation) and self._main.interrupt_until_left(timeout_s, process_groups.cut)
            if not left:
                self._replace(f"the main thread did not leave the block within {timeout_s:.0f} s")


class _FaultThread:
    """Handles the fault notices of one rank, in order of arrival, while the main thread may be blocked.

    Args:
        handle: called with the generation that is over; its run time must be bounded.
        failed: called with the reason if ``handle`` raised; this process cannot be trusted to leave its block then.
    """

    def __init__(self, handle: Callable[[int], None], failed: Callable[[str], None]) -> None:
        self._handle = handle
        self._failed = failed
        self._notices: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="checkpointless-fault-thread", daemon=True)
        self._thread.start()

    def notify(self, generation: int) -> None:
        """Queue a notice and return at once."""
        self._notices.put(generation)

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """End the thread."""
        self._notices.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (generation := self._notices.get()) is not None:
            try:
                self._handle(generation)
            except Exception as error:
                logger.exception("the fault of generation %d could not be handled", generation)
                self._failed(line_of(error))
