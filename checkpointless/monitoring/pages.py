"""The pages that can be read about a job: ``/healthz``, ``/status`` and ``/metrics``, each made from a snapshot."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

from checkpointless.monitoring.durations import Durations
from checkpointless.monitoring.measured import Measuring
from checkpointless.monitoring.snapshot import Snapshot

TEXT = "text/plain; charset=utf-8"
_JSON = "application/json"


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


class Pages:
    """The pages that can be read, each made from a snapshot on request, once per snapshot.

    One thread at a time may use them.

    Args:
        watch: holds the snapshot.

    Attributes:
        lacks: why there are no metrics ("" if there are).
    """

    def __init__(self, watch: Watched) -> None:
        self._watch = watch
        self._made: dict[str, tuple[Snapshot, Page]] = {}
        self._pages: dict[str, Callable[[Snapshot], Page]] = {"/status": _status}
        self.lacks = ""
        try:
            from checkpointless.monitoring import prometheus
        except ImportError as error:
            self.lacks = f"/metrics needs {error.name}: pip install 'checkpointless[metrics]'"
            page = Page(HTTPStatus.NOT_IMPLEMENTED, TEXT, f"{self.lacks}\n".encode())
            self._pages["/metrics"] = lambda _: page
        else:

            def rendered(now: Snapshot) -> Page:
                measured = watch.measuring.ask() if watch.measuring is not None else None
                return Page(HTTPStatus.OK, prometheus.CONTENT_TYPE, prometheus.render(now, measured))

            self._pages["/metrics"] = rendered

    def at(self, path: str) -> Page | None:
        """Return the page at exactly this path, or None if there is none."""
        snapshot = self._watch.snapshot
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


def _status(snapshot: Snapshot) -> Page:
    return Page(HTTPStatus.OK, _JSON, json.dumps(snapshot, default=_plain).encode() + b"\n")


def _plain(value: object) -> dict[str, object]:
    if isinstance(value, Durations):
        return {"count": value.counts[-1], "seconds": round(value.seconds, 3)}
    return {key: item for key, item in vars(value).items() if key != "looked_at_s"}  # on this machine's own clock
