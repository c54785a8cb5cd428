"""The pages that can be read about a job: ``/healthz``, ``/status``, ``/metrics``, and ``/``, which lists them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

from checkpointless.monitoring import prometheus
from checkpointless.monitoring.accounting import Accounting
from checkpointless.monitoring.durations import Durations
from checkpointless.monitoring.measured import Measuring
from checkpointless.monitoring.snapshot import JobNames, Snapshot

TEXT = "text/plain; charset=utf-8"
_JSON = "application/json"
#: What there is, for ``/`` and for whoever asks for something else.
PATHS = """\
/healthz  200 while the job goes on, else 503
/status   the ranks, and where the coordinator is the job, as JSON
/metrics  for Prometheus
"""


@dataclass(frozen=True)
class Page:
    """An HTTP response."""

    status: HTTPStatus
    content_type: str
    body: bytes


class Watched(Protocol):
    """Where a loop leaves what it sees, for another thread to read."""

    @property
    def snapshot(self) -> Snapshot:
        """The newest look at the job."""

    @property
    def measuring(self) -> Measuring | None:
        """Reads what the ranks of this node measured; None where there is no event log."""

    @property
    def accounting(self) -> Accounting | None:
        """Reads what the run's time was spent on; None where there is no event log."""

    @property
    def names(self) -> JobNames:
        """What the job is called."""


class Pages:
    """The pages that can be read, each made from a snapshot on request, once per snapshot.

    One thread at a time may use them.

    Args:
        watch: holds the snapshot.
    """

    def __init__(self, watch: Watched) -> None:
        self._watch = watch
        self._made: dict[str, tuple[Snapshot, Page]] = {}
        self._pages: dict[str, Callable[[Snapshot], Page]] = {"/status": _status, "/metrics": self._metrics}

    def at(self, path: str) -> Page | None:
        """Return the page at exactly this path, or None if there is none."""
        snapshot = self._watch.snapshot
        if path == "/":
            return Page(HTTPStatus.OK, TEXT, PATHS.encode())
        if path == "/healthz":
            well, words = snapshot.health(time.monotonic())
            status = HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE
            return Page(status, TEXT, f"{words}\n".encode())
        make = self._pages.get(path)
        if make is None:
            return None
        of, page = self._made.get(path, (None, None))
        if page is None or of is not snapshot:
            page = make(snapshot)
            self._made[path] = (snapshot, page)
        return page

    def _metrics(self, now: Snapshot) -> Page:
        watch = self._watch
        measured = watch.measuring.ask() if watch.measuring is not None else None
        account = None
        if watch.accounting is not None and now.job is not None:  # the run's, so once for all nodes
            account = watch.accounting.ask(now.high_water)
        return Page(HTTPStatus.OK, prometheus.CONTENT_TYPE, prometheus.render(now, measured, account, watch.names))


def _status(snapshot: Snapshot) -> Page:
    return Page(HTTPStatus.OK, _JSON, json.dumps(snapshot, default=_plain).encode() + b"\n")


def _plain(value: object) -> dict[str, object]:
    if isinstance(value, Durations):
        return {"count": value.counts[-1], "seconds": round(value.seconds, 3)}
    return {key: item for key, item in vars(value).items() if key != "looked_at_s"}  # on this machine's own clock
