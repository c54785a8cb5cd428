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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import msgspec

from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.scribe import scribe
from checkpointless.system.environment import NODE_RANK_ENV, RANK_ENV, own_run_dir

Edge = Literal["begin", "end", "point"]
_Whole = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_Time = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Number = Annotated[int, msgspec.Meta(ge=-1, le=(1 << 31) - 1)]
_Parsed = TypeVar("_Parsed")
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e10)]
logger = logging.getLogger(__name__)
EVENTS_FILE = "events.jsonl"
#: What JSON has a form for.
JsonValue = bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"] | None
_OWN_KEYS = ("ts", "mono", "node", "rank", "pid", "generation", "incident", "stage", "edge")


@dataclass(frozen=True)
class Event:
    """One line of the event log."""

    ts: int  # UTC time, in nanoseconds since the epoch
    mono: int  # monotonic clock, in nanoseconds; comparable between the processes of one node
    node: int
    rank: int | None  # rank that the event is about; None for an agent's own event
    pid: int
    generation: int
    incident: str | None
    # what the event reports; a plain word if a newer version's log names what this version does not know
    stage: EventName | str
    edge: Edge  # ``begin`` or ``end`` of a span, or a ``point`` in time
    # further fields of the line (bytes, sources, seconds, cause, ...)
    fields: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, line: bytes) -> Event | None:
        """Parse a line of the log; return None if it is not an event."""
        record = _object_of(line)
        own = _checked(record, _EventLine)
        if record is None or own is None:
            return None
        known: dict[str, Any] = {key: getattr(own, key) for key in _OWN_KEYS} | {"stage": EventName.of(own.stage)}
        return cls(**known, fields={key: value for key, value in record.items() if key not in _OWN_KEYS})


class EventLog:
    """Appends events to one file, which any number of processes and threads may share; without ``path`` to none.

    :meth:`emit` never waits for the disk and never fails because of it: a thread of the process
    (:mod:`checkpointless.observability.telemetry.scribe`) writes. Every line is one ``write(2)`` with ``O_APPEND``,
    so lines never mix, and no descriptor is held between lines: the log survives forks and clean-ups. Lines that
    cannot be written, or that come while thousands wait for a stalled disk, are dropped, points outside of
    incidents first; one line says how many, once lines can be written again. ``seen`` gets all events.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        node: int = 0,
        rank: int | None = None,
        seen: Callable[[Mapping[str, Any]], None] = lambda _: None,
    ) -> None:
        self.path, self.node, self.rank, self._seen = path, node, rank, seen

    @classmethod
    def here(cls) -> EventLog:
        """Return the log that this process's environment names; without a run directory, it drops every event."""
        run_dir, rank = own_run_dir(), os.environ.get(RANK_ENV)
        path = None if run_dir is None else run_dir / EVENTS_FILE
        return cls(path, node=int(os.environ.get(NODE_RANK_ENV, "0")), rank=int(rank) if rank else None)

    def emit(
        self,
        stage: EventName,
        edge: Edge,
        *,
        generation: int,
        incident: str | None = None,
        rank: int | None = None,
        **fields: Any,
    ) -> None:
        """Queue one event, of the log's own rank unless one is given; never wait."""
        self._seen({**fields, "stage": stage, "edge": edge, "generation": generation, "incident": incident})
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
        self, stage: EventName, *, generation: int, incident: str | None = None, **fields: Any
    ) -> Iterator[dict[str, Any]]:
        """Emit ``begin``, and in the end ``end`` with ``seconds``, any ``error``, and the yielded dict's fields."""
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
    """Counts the lines that one file did not get, and writes the count once lines can be written again.

    Only one thread calls :meth:`append`; any thread may call :meth:`add`.
    """

    def __init__(self) -> None:
        self._left_out = itertools.count()  # advanced in C: neither threads nor interruptions lose a count
        self._looked = self._unwritten = self._told = 0
        self._has_complained = False

    def add(self) -> None:
        next(self._left_out)

    def append(self, path: Path, line: str, origin: Mapping[str, Any]) -> None:
        left_out = next(self._left_out) - self._looked
        self._looked += 1
        count = left_out + self._unwritten - self._told
        try:
            if count:
                told: dict[str, Any] = {"ts": time.time_ns(), "mono": time.monotonic_ns()}
                told |= {**origin, "incident": None, "stage": EventName.EVENTS_DROPPED, "edge": "point"}
                told["count"] = count
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


os.register_at_fork(after_in_child=_losses.clear)  # the parent process reports what it lost


def _append(path: Path, line: str, origin: Mapping[str, Any]) -> None:
    _losses.setdefault(path, _Losses()).append(path, line, origin)


_opener = functools.partial(os.open, mode=0o644)  # runs in C from end to end: cannot be interrupted


def append_line(path: Path, line: str) -> None:
    """Append ``line`` and a newline with one ``write(2)``; raise ``OSError`` if that did not write all of it."""
    data = line.encode() + b"\n"
    # The object that open() returns closes its descriptor even if an interruption comes before it has a name.
    with open(path, "ab", buffering=0, opener=_opener) as file:
        written = file.write(data)
    if written != len(data):
        raise OSError(f"{path}: only {written} of {len(data)} bytes were written")


def read_lines(path: Path, kind: type[_Parsed]) -> Iterator[_Parsed]:
    """Yield what the lines of a file say, as objects of a class of msgspec's; nothing without a file.

    A writer that was killed leaves a torn line: it is skipped, and a line that another one has appended to it is
    yielded. Lines that are broken in another way are skipped, with one warning.
    """
    return _parsed(path, lambda line: _checked(_object_of(line), kind), kind.__name__)


def read_events(run_dir: Path) -> list[Event]:
    """Return all events of a run, including those of this process; one warning counts lines that are no events."""
    scribe.flush()
    return [*_parsed(run_dir / EVENTS_FILE, Event.parse, "event")]


def _parsed(path: Path, parse: Callable[[bytes], _Parsed | None], kind: str) -> Iterator[_Parsed]:
    """Yield what ``parse`` makes of each whole line; leave other lines out, with one warning."""
    odd = []
    data = path.read_bytes() if path.exists() else b""
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        found = parse(line)
        if found is not None:
            yield found
        else:
            odd.append(number)
    if odd:
        which = f"line {odd[0]} is" if len(odd) == 1 else f"{len(odd)} lines, from line {odd[0]} on, are"
        logger.warning("%s: %s no %s, and left out", path, which, kind if len(odd) == 1 else f"{kind}s")


def json_safe(value: object) -> JsonValue:
    """Convert ``value`` to plain JSON types; values without a JSON form become text, non-finite floats included."""
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


# --- A line of the event log, and the types of its fields ---------------------------------------------------------


class _EventLine(msgspec.Struct):
    """What a line must have, and the types of those of its further fields that are calculated with or shown."""

    ts: _Time
    mono: _Time
    node: _Number
    rank: _Number | None
    pid: _Whole
    generation: _Number
    incident: str | None
    stage: str
    edge: Edge
    bytes: _Whole | None = None
    cause: str | None = None
    code: _Whole | None = None
    culprit: _Number | None = None
    high_water: _Whole | None = None
    how: str | None = None
    made: bool | None = None
    nnodes: _Number | None = None
    nproc: _Number | None = None
    path: str | None = None
    ranks: list[_Number] | None = None
    reason: str | list[str] | None = None
    rung: str | None = None
    seconds: _Seconds | None = None
    sources: list[_Number] | None = None
    spec: str | None = None
    step: _Whole | None = None
    steps_lost: _Whole | None = None
    target: _Whole | None = None
    tier: str | None = None
    undetected_s: _Seconds | None = None


_MOST_STARTS = 64  # at which a line may begin again after a torn one


def _object_of(line: bytes) -> dict[str, Any] | None:
    """Return the object that a line is, or that follows the torn beginning of another line; None without one."""
    start = line.find(b"{")
    for _ in range(_MOST_STARTS):
        if start < 0:
            return None
        try:
            record = json.loads(line[start:], parse_constant=_refuse)
        except (ValueError, RecursionError):
            start = line.find(b'{"', start + 1)
            continue
        return record if isinstance(record, dict) else None
    return None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _checked(record: dict[str, Any] | None, kind: type[_Parsed]) -> _Parsed | None:
    """Return what a line must have, if it has it; else None."""
    try:
        return None if record is None else msgspec.convert(record, kind)
    except (msgspec.ValidationError, ValueError, RecursionError) as error:  # ValueError: text that is no UTF-8
        logger.debug("a line is no %s: %s", kind.__name__, error)
        return None


class LineTail:
    """Reads the complete lines that were appended to a file since the last call, ``max_bytes`` at most; a longer
    line is skipped. A file that became shorter, or that was replaced, is read from its beginning.
    """

    def __init__(self, path: Path, max_bytes: int, *, from_start: bool = False) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._inode, self._offset = -1, 0
        self._in_long_line = False
        self._complained = False
        if from_start:
            return
        try:
            found = path.stat()
        except OSError:
            return  # it does not exist yet; if it cannot be read, the first call warns
        self._inode, self._offset = found.st_ino, found.st_size

    def lines(self) -> list[bytes]:
        """Return the new lines without their newlines; none while the file cannot be read."""
        try:
            with self._path.open("rb") as log:
                found = os.fstat(log.fileno())
                if found.st_ino != self._inode or found.st_size < self._offset:
                    self._inode, self._offset, self._in_long_line = found.st_ino, 0, False
                log.seek(self._offset)
                data = log.read(self._max_bytes)
        except FileNotFoundError:
            return []
        except OSError as error:
            if not self._complained:
                logger.warning("what is appended to %s is not read: %s", self._path, error.strerror)
                self._complained = True
            return []
        self._complained = False
        whole, newline, torn = data.rpartition(b"\n")
        if not newline:
            if len(data) == self._max_bytes:
                self._offset += len(data)
                self._in_long_line = True
            return []
        self._offset += len(data) - len(torn)
        lines = whole.split(b"\n")
        if self._in_long_line:
            self._in_long_line = False
            return lines[1:]
        return lines
