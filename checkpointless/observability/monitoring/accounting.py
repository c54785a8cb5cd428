"""What the run's time was spent on so far: what ``checkpointless report`` makes of the same events."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from checkpointless.observability.monitoring.event_reader import MAX_BYTES, EventReader
from checkpointless.observability.report.summary import build_report
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import Event, parse_event
from checkpointless.observability.telemetry.lines import LineTail
from checkpointless.observability.telemetry.timeline import on_one_timeline

logger = logging.getLogger(__name__)

MAX_EVENTS = 50_000  # about 50 MB; a log with more has no account
_SHARE = 20  # an account is made in at most a twentieth of the time


@dataclass(frozen=True)
class Account:
    """What the run's time was spent on so far.

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


class Accounting(EventReader):
    """Makes the account of a run anew whenever its event log has grown, while somebody asks for it.

    Args:
        path: path of the log.

    Attributes:
        account: the newest account; it is replaced, never changed.
    """

    def __init__(self, path: Path) -> None:
        super().__init__("accounting")
        self._tail = LineTail(path, max_bytes=MAX_BYTES, from_start=True)
        self._run_dir = str(path.parent)
        self._events: list[Event] = []
        self._is_new = False
        self._is_too_long = False
        self._again_at_s = 0.0
        self._newest = 0
        self.account = Account()

    def ask(self, high_water: int | None) -> Account:
        """Return at once what is known, and keep it up to date for a while.

        Args:
            high_water: the newest committed step, which events tell only once per minute.
        """
        self.asked()
        self._newest = max(self._newest, high_water or 0, self.account.last_step or 0)  # never less: it is counted
        return replace(self.account, last_step=self._newest)

    def look(self, now_s: float) -> None:
        """Read the lines that were appended, and make the account if that is due.

        Args:
            now_s: the current time on the monotonic clock.
        """
        if self._is_too_long:
            return
        began_s = time.perf_counter()
        events = [event for event in map(parse_event, self._tail.lines()) if event is not None]
        self._is_new = self._is_new or bool(events)
        self._events += events
        if len(self._events) > MAX_EVENTS:
            logger.warning("the event log has over %d events: the metrics have no account any more", MAX_EVENTS)
            self._is_too_long, self._events, self.account = True, [], Account()
        elif self._is_new and now_s >= self._again_at_s:
            self.account, self._is_new = account_of(self._run_dir, on_one_timeline(self._events)), False
            self._again_at_s = now_s + _SHARE * (time.perf_counter() - began_s)


def account_of(run_dir: str, events: list[Event]) -> Account:
    """Return what the run's time was spent on, as its report says it.

    Args:
        run_dir: the run directory, as the report shows it.
        events: all events of the run, in any order.
    """
    report = build_report(run_dir, events)
    run, spent = report.run, report.spent
    made: dict[int, int] = {}
    for event in events:
        step = event.fields.get("step")
        if event.stage == EventName.FIRST_STEP and event.edge == "end" and isinstance(step, int):
            made[event.generation] = min(step, made.get(event.generation, step))
    if spent is None:
        return Account()
    return Account(
        first_step=made[min(made)] if made else None,
        last_step=run.last_step,
        step_s=run.step_s,
        ettr=spent.ettr,
        ettr_while_training=spent.ettr_while_training,
        spent_s={
            "startup": spent.startup_s,
            "training": spent.training_s,
            "recovery": spent.recovery_s,
            "repeated": spent.repeated_s,
            "shutdown": spent.shutdown_s,
        },
    )
