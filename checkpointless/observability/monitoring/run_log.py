"""The event log of a run, read while somebody asks for metrics: what ranks measured, and what time was spent on.

The ranks log each stage of a recovery with its duration anyway, so metrics cost neither a rank nor the agent's loop
anything. The run directory may be on a disk that many nodes share and that may stop answering: so neither the loop
nor the threads that answer clients read it.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from checkpointless.observability.report.summary import build_report
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import Event, LineTail, on_one_timeline, parse_event

logger = logging.getLogger(__name__)

MAX_EVENTS = 50_000  # about 50 MB; a log with more has no account
ASKED_FOR_S = 300.0  # how long reading continues after a request
_MAX_BYTES = 4 * 1024 * 1024  # that are read at once
_EVERY_S = 1.0
_CLOSE_TIMEOUT_S = 1.0
_SHARE = 20  # an account is made in at most a twentieth of the time
_OWNER = re.compile(rb'"node":(-?\d{1,9}),"rank":(null|\d{1,9}),')
_OWNER_WITHIN = 256  # bytes from the start of a line


@dataclass(frozen=True)
class Account:
    """What the run's time was spent on so far, as its report says it.

    Attributes:
        first_step: the first step of the job; None if no event says so.
        last_step: the newest step that any event mentions; None if none does.
        step_s: duration of an undisturbed step, in seconds; None if not known.
        ettr: effective training time over wall-clock time; None if not known.
        ettr_while_training: the same without start-up and shutdown; None if not known.
        spent_s: seconds by what they were spent on; None for what is not known.
    """

    first_step: int | None = None
    last_step: int | None = None
    step_s: float | None = None
    ettr: float | None = None
    ettr_while_training: float | None = None
    spent_s: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def steps(self) -> int | None:
        """How many optimizer steps the job has made, those that are repeated counted once; None if not known."""
        if self.first_step is None or self.last_step is None:
            return None
        return max(0, self.last_step - self.first_step + 1)


class RunLog:
    """Reads an event log in a thread, once per second, for :data:`ASKED_FOR_S` after each question.

    Args:
        ranks: returns the ranks of the node; a spare has none until it takes a place.
        take: called with each event of the node that was written since this object was made.

    Attributes:
        account: the newest account; it is replaced, never changed.
    """

    def __init__(
        self, path: Path, node: int, ranks: Callable[[], frozenset[int]], take: Callable[[Event], None]
    ) -> None:
        self._tail = LineTail(path, max_bytes=_MAX_BYTES, from_start=True)
        self._run_dir, self._node, self._ranks, self._take = str(path.parent), node, ranks, take
        self._began_ns = time.time_ns()
        self._events: list[Event] = []
        self._is_new, self._has_account = False, True
        self._again_at_s, self._asked_at_s = 0.0, -math.inf
        self._newest = 0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.account = Account()

    def ask(self, high_water: int | None, has_account: bool = True) -> Account:
        """Return at once what is known, and keep it up to date for a while; one thread at a time may call this.

        Args:
            high_water: the newest committed step, which events tell only once per minute.
            has_account: whether an account is made, for which the events of all nodes are kept.
        """
        self._asked_at_s = time.monotonic()
        self._has_account &= has_account
        if self._thread is None and not self._closing.is_set():
            self._thread = threading.Thread(target=self._read, name="checkpointless-run-log", daemon=True)
            self._thread.start()
        self._newest = max(self._newest, high_water or 0, self.account.last_step or 0)  # never less: it is counted
        return replace(self.account, last_step=self._newest)

    def look(self, now_s: float) -> None:
        """Read the lines that were appended, and make the account if that is due."""
        began_s, ranks = time.perf_counter(), self._ranks()
        for line in self._tail.lines():
            is_own = self._is_own(line, ranks)
            event = parse_event(line) if is_own or self._has_account else None
            if event is None:
                continue
            if is_own and event.ts >= self._began_ns:
                self._take(event)
            self._events.append(event)
            self._is_new = True
        if len(self._events) > MAX_EVENTS and self._has_account:
            logger.warning("the event log has over %d events: the metrics have no account any more", MAX_EVENTS)
            self._has_account = False
        if not self._has_account:
            self._is_new, self._events, self.account = False, [], Account()
        elif self._is_new and now_s >= self._again_at_s:
            self.account, self._is_new = _account_of(self._run_dir, on_one_timeline(self._events)), False
            self._again_at_s = now_s + _SHARE * (time.perf_counter() - began_s)

    def _is_own(self, line: bytes, ranks: frozenset[int]) -> bool:
        """Return whether a line is about a rank of this node, or its agent; the others are not parsed for it."""
        owner = _OWNER.search(line[:_OWNER_WITHIN])
        if owner is None:
            return False
        node, rank = owner.groups()
        return int(node) == self._node if rank == b"null" else int(rank) in ranks

    def close(self) -> None:
        """Stop reading."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)  # not forever: the disk may not answer

    def _read(self) -> None:
        try:
            while True:
                now_s = time.monotonic()
                if now_s - self._asked_at_s <= ASKED_FOR_S:
                    self.look(now_s)
                if self._closing.wait(_EVERY_S):
                    return
        except Exception:
            logger.exception("the event log is read no more: the metrics that come from it stay as they are")


def _account_of(run_dir: str, events: list[Event]) -> Account:
    """Return what the run's time was spent on, as its report says it."""
    report = build_report(run_dir, events)
    run, spent = report.run, report.spent
    made: dict[int, int] = {}
    for event in events:
        step = event.fields.get("step")
        if event.stage == EventName.FIRST_STEP and event.edge == "end" and isinstance(step, int):
            made[event.generation] = min(step, made.get(event.generation, step))
    if spent is None:
        return Account()
    activities = ("startup", "training", "recovery", "repeated", "shutdown")
    return Account(
        first_step=made[min(made)] if made else None,
        last_step=run.last_step,
        step_s=run.step_s,
        ettr=spent.ettr,
        ettr_while_training=spent.ettr_while_training,
        spent_s={name: getattr(spent, f"{name}_s") for name in activities},
    )
