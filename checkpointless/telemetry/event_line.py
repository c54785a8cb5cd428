"""A line of the event log: what it must have, so that whoever reads events can rely on their types."""

from __future__ import annotations

import json
import logging
from typing import Annotated, Any, Literal, NoReturn, get_args

import msgspec

logger = logging.getLogger(__name__)

Edge = Literal["begin", "end", "point"]
EDGES: tuple[Edge, ...] = get_args(Edge)

_Whole = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_Time = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Number = Annotated[int, msgspec.Meta(ge=-1, le=(1 << 31) - 1)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e10)]


class EventLine(msgspec.Struct):
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
    peak_growth_bytes: _Whole | None = None
    ranks: list[_Number] | None = None
    reason: str | list[str] | None = None
    rung: str | None = None
    samples_per_step: _Whole | None = None
    seconds: _Seconds | None = None
    sources: list[_Number] | None = None
    spec: str | None = None
    step: _Whole | None = None
    steps_lost: _Whole | None = None
    target: _Whole | None = None
    tier: str | None = None
    undetected_s: _Seconds | None = None


_DEEPEST = 16  # how deeply values may be nested: what writes them out again may not run out of stack
_MOST_STARTS = 64  # at which a line may begin anew after a torn one


def _is_shallow(value: object, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_is_shallow(each, levels - 1) for each in inner)


def object_of(line: bytes) -> dict[str, Any] | None:
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


def checked(record: dict[str, Any]) -> EventLine | None:
    """Return what a line must have, if it has it; None if the line is not an event."""
    try:
        line = msgspec.convert(record, EventLine)
    except (msgspec.ValidationError, ValueError, RecursionError) as error:  # ValueError: text that is no UTF-8
        logger.debug("a line is not an event: %s", error)
        return None
    return line if _is_shallow(record, _DEEPEST) else None
