"""The event log: one JSON object per line in ``<run dir>/events.jsonl``, from every process of a job."""

from __future__ import annotations

import enum
import functools
import itertools
import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

from checkpointless.telemetry.scribe import FLUSH_S, scribe

logger = logging.getLogger(__name__)

RUN_DIR_ENV = "CHECKPOINTLESS_RUN_DIR"
EVENTS_FILE = "events.jsonl"

Edge = Literal["begin", "end", "point"]
EDGES: tuple[Edge, ...] = get_args(Edge)

#: The stages of an incident, in the order in which they come.
STAGES = (
    "detect",
    "notify",
    "abort",
    "finalize",
    "health",
    "barrier",
    "init",
    "rebuild",
    "decide",
    "transfer",
    "verify",
    "data",
    "first_step",
)
#: Written just before a fault is caused on purpose.
FAULT_INJECTED = "fault_injected"
#: Written by a process that had to leave events out, as soon as it can write again; ``count`` says how many.
EVENTS_DROPPED = "events_dropped"

_OWN_KEYS = ("ts", "mono", "node", "rank", "pid", "generation", "incident", "stage", "edge")


@dataclass(frozen=True)
class Event:
    """One line of the event log.

    Attributes:
        ts: UTC time in nanoseconds since the epoch.
        mono: monotonic clock in nanoseconds, comparable between the processes of one node.
        node: index of the node.
        rank: the rank it is about, or None (an agent's own event).
        pid: the process that wrote it.
        generation: the generation in which it happened.
        incident: id of the incident it belongs to, or None.
        stage: one of :data:`STAGES`, or another word.
        edge: ``begin`` or ``end`` of a span, or a ``point`` in time.
        fields: what else the line says (bytes, sources, seconds, cause...).
    """

    ts: int
    mono: int
    node: int
    rank: int | None
    pid: int
    generation: int
    incident: str | None
    stage: str
    edge: Edge
    fields: Mapping[str, Any] = field(default_factory=dict)


class EventLog:
    """Appends events to one file, which any number of processes and threads may share.

    Whoever emits never waits for the disk, and never fails because of it: a thread of the process writes
    (:mod:`checkpointless.telemetry.scribe`), in the order in which the events were emitted. Every line is one
    ``write(2)`` to a file opened with ``O_APPEND``, so lines never mix. No descriptor is held between lines: the
    log survives forks and clean-ups, and leaves nothing behind. Lines that cannot be written (disk full, directory
    gone) and those that come while thousands wait for a disk that has stopped are left out; one line says how many,
    once lines can be written again. Points outside of incidents are left out first.

    Args:
        path: the file; None drops everything.
        node: index of this node.
        rank: the rank that writes, where an event does not name another.
    """

    def __init__(self, path: Path | None, *, node: int = 0, rank: int | None = None) -> None:
        self.path = path
        self.node = node
        self.rank = rank

    def emit(
        self,
        stage: str,
        edge: Edge,
        *,
        generation: int,
        incident: str | None = None,
        rank: int | None = None,
        **fields: Any,
    ) -> None:
        """Have one event appended, stamped with the time of now and this process; never waits.

        Args:
            stage: one of :data:`STAGES`, or another word.
            edge: ``begin``, ``end`` or ``point``.
            generation: the generation in which it happens.
            incident: id of the incident it belongs to.
            rank: the rank that it is about (default: the log's own).
            **fields: more to say; whatever is not plain JSON (paths, enums, sets...) is turned into it.

        Raises:
            ValueError: an unknown edge, or a field named like one of the log's own.
        """
        if edge not in EDGES:
            raise ValueError(f"edge must be one of {', '.join(EDGES)}, not {edge!r}")
        taken = sorted(set(fields).intersection(_OWN_KEYS))
        if taken:
            raise ValueError(f"an event has its own {', '.join(taken)}: use another field name")
        if self.path is None:
            return
        record = {
            "ts": time.time_ns(),
            "mono": time.monotonic_ns(),
            "node": self.node,
            "rank": self.rank if rank is None else rank,
            "pid": os.getpid(),
            "generation": generation,
            "incident": incident,
            "stage": stage,
            "edge": edge,
            **{key: json_safe(value) for key, value in fields.items()},
        }
        line = json.dumps(record, separators=(",", ":"), allow_nan=False)
        origin = {key: record[key] for key in ("node", "rank", "pid", "generation")}
        chatter = edge == "point" and incident is None
        if not scribe.put(functools.partial(_append, self.path, line, origin), chatter=chatter):
            _losses.setdefault(self.path, _Losses()).add()

    @contextmanager
    def span(
        self, stage: str, *, generation: int, incident: str | None = None, **fields: Any
    ) -> Iterator[dict[str, Any]]:
        """Emit ``begin`` now and, when the block is left, ``end`` with ``seconds`` and (if it raised) ``error``.

        Yields:
            A dict; what is put into it goes into the ``end`` line.
        """
        more: dict[str, Any] = {}
        self.emit(stage, "begin", generation=generation, incident=incident, **fields)
        started_s = time.monotonic()
        try:
            yield more
        except BaseException as error:
            more["error"] = f"{type(error).__name__}: {error}"
            raise
        finally:
            more["seconds"] = time.monotonic() - started_s
            self.emit(stage, "end", generation=generation, incident=incident, **{**fields, **more})


class _Losses:
    """Keeps account of the lines that one file did not get, and writes how many when it takes lines again.

    :meth:`append` is called in one thread only, :meth:`add` in any.
    """

    def __init__(self) -> None:
        self._left_out = itertools.count()  # moved on in C: neither threads nor interruptions lose one
        self._looked = self._unwritten = self._told = 0
        self._has_complained = False

    def add(self) -> None:
        """A line was left out."""
        next(self._left_out)

    def append(self, path: Path, line: str, origin: Mapping[str, Any]) -> None:
        """Append ``line``, of that node, rank, pid and generation; if that fails it is counted and said once."""
        left_out = next(self._left_out) - self._looked
        self._looked += 1
        count = left_out + self._unwritten - self._told
        try:
            if count:
                told: dict[str, Any] = {"ts": time.time_ns(), "mono": time.monotonic_ns()}
                told |= {**origin, "incident": None, "stage": EVENTS_DROPPED, "edge": "point", "count": count}
                append_line(path, json.dumps(told, separators=(",", ":")))
                self._told += count
            append_line(path, line)
        except OSError as error:
            self._unwritten += 1
            if not self._has_complained:
                logger.warning("events are lost as long as %s cannot be written: %s", path, error.strerror or error)
            self._has_complained = True
        else:
            self._has_complained = False


_losses: dict[Path, _Losses] = {}
os.register_at_fork(after_in_child=_losses.clear)  # the parent says what it lost


def _append(path: Path, line: str, origin: Mapping[str, Any]) -> None:
    _losses.setdefault(path, _Losses()).append(path, line, origin)


def flush_events(timeout_s: float = FLUSH_S) -> bool:
    """Wait until the events of this process are written.

    Args:
        timeout_s: for how long at most.

    Returns:
        Whether they are.
    """
    return scribe.flush(timeout_s)


def event_log() -> EventLog:
    """The log of this process, as its environment says: ``CHECKPOINTLESS_RUN_DIR``, ``RANK``, ``NODE_RANK``.

    Without a run directory it is a log that drops everything.
    """
    run_dir = os.environ.get(RUN_DIR_ENV)
    rank = os.environ.get("RANK")
    return EventLog(
        Path(run_dir) / EVENTS_FILE if run_dir else None,
        node=int(os.environ.get("NODE_RANK", "0")),
        rank=int(rank) if rank else None,
    )


_opener = functools.partial(os.open, mode=0o644)  # in C from end to end: nothing of it can be interrupted


def append_line(path: Path, line: str) -> None:
    """Append ``line`` and a newline to ``path`` with one ``write(2)``; makes the file if it is not there.

    Raises:
        OSError: it could not be written, or not wholly.
    """
    data = line.encode() + b"\n"
    # An object of open() closes its descriptor also if an interruption comes before it has a name.
    with open(path, "ab", buffering=0, opener=_opener) as file:
        written = file.write(data)
    if written != len(data):
        raise OSError(f"{path}: only {written} of {len(data)} bytes were written")


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The JSON objects of a file of JSON lines, with their line numbers from 1.

    What a writer wrote when it was killed may lack its end: as the last line it is left out, and where another
    writer has appended a line to it, that one is given. A line that is broken otherwise is left out with a warning.
    """
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        record = _record(line)
        if record is not None:
            yield number, record
        else:
            logger.warning("%s:%d is not a JSON object and was left out", path, number)


def read_events(run_dir: Path) -> list[Event]:
    """All events of a run, in the order in which they were written, those of this process included.

    Args:
        run_dir: the run directory; one without an event file has no events.
    """
    flush_events()
    path = run_dir / EVENTS_FILE
    if not path.exists():
        return []
    events = []
    for number, record in read_lines(path):
        try:
            events.append(_event(record))
        except (KeyError, TypeError, ValueError) as error:
            logger.warning("%s:%d is not an event and was left out: %r", path, number, error)
    return events


def parse_event(line: bytes) -> Event | None:
    """The event that a line of the log is; None, with a warning, if it is none."""
    try:
        return _event(_record(line) or {})
    except (KeyError, TypeError, ValueError) as error:
        logger.warning("a line is not an event and was left out: %r", error)
        return None


def _record(line: bytes) -> dict[str, Any] | None:
    """The object that a line is, or ends with behind the torn beginning of another one; None if there is none."""
    start = line.find(b"{")
    while start >= 0:
        try:
            record = json.loads(line[start:])
        except (ValueError, RecursionError):
            start = line.find(b'{"', start + 1)
            continue
        return record if isinstance(record, dict) else None
    return None


def json_safe(value: Any) -> Any:
    """``value`` as plain JSON types; what has no JSON form becomes text, non-finite floats too."""
    if value is None or isinstance(value, bool | int | str):
        return value.value if isinstance(value, enum.Enum) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, enum.Enum):
        return json_safe(value.value)
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((json_safe(item) for item in value), key=str)
    return str(value)


def _event(record: dict[str, Any]) -> Event:
    if record["edge"] not in EDGES:
        raise ValueError(f"edge {record['edge']!r}")
    return Event(
        ts=int(record["ts"]),
        mono=int(record["mono"]),
        node=int(record["node"]),
        rank=None if record["rank"] is None else int(record["rank"]),
        pid=int(record["pid"]),
        generation=int(record["generation"]),
        incident=record["incident"],
        stage=str(record["stage"]),
        edge=cast(Edge, record["edge"]),
        fields={key: value for key, value in record.items() if key not in _OWN_KEYS},
    )
