"""The messages between a rank and its agent: JSON objects, one per line; nothing is evaluated or unpickled."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, ClassVar, get_type_hints

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 256 * 1024
_SHORTENED = "[... shortened ...]"


class ProtocolError(ValueError):
    """The data received (or to be sent) is not a message of this protocol."""


class Sender(Enum):
    """The side that sends a message; both sides have a message of type ``fault``."""

    RANK = "rank"
    AGENT = "agent"


@dataclass(frozen=True)
class Hello:
    """The rank is at the entry of its block and waits for ``go``.

    Attributes:
        generation: the generation in the rank's environment.
    """

    type: ClassVar[str] = "hello"
    rank: int
    pid: int
    generation: int


@dataclass(frozen=True)
class FaultReport:
    """Something went wrong in a rank.

    Attributes:
        error: name of the exception's type.
        step: the optimizer step in the making, from 1 (-1: none).
        victim: whether the error is a broken collective or store connection, so probably another rank's fault.
    """

    type: ClassVar[str] = "fault"
    generation: int
    error: str
    message: str
    traceback: str
    step: int
    victim: bool


@dataclass(frozen=True)
class Barrier:
    """The rank has left ``generation``, is clean and healthy, and waits for ``go``."""

    type: ClassVar[str] = "barrier"
    generation: int


@dataclass(frozen=True)
class Replace:
    """The rank's process must not be used again; it exits next and asks for a successor."""

    type: ClassVar[str] = "replace"
    generation: int
    reason: str


@dataclass(frozen=True)
class Done:
    """The rank's block has returned; it waits for ``finish``, or for ``fault`` if another rank still needs it."""

    type: ClassVar[str] = "done"
    generation: int


@dataclass(frozen=True)
class GiveUp:
    """The job cannot continue; ``reason`` is its last message and ``code`` its exit code."""

    type: ClassVar[str] = "giveup"
    generation: int
    reason: str
    code: int = 1


@dataclass(frozen=True)
class Answer:
    """The reply to ``inquire``: whether the main thread waits in a collective, and its stack as text."""

    type: ClassVar[str] = "answer"
    id: int
    in_collective: bool
    stack: str


@dataclass(frozen=True)
class Go:
    """All ranks are present: the rank enters its block.

    Attributes:
        incident: the incident that led here (None at the first start).
        env: variables to put into ``os.environ``.
        high_water: the highest optimizer step that any rank was ever seen to commit (-1: none).
    """

    type: ClassVar[str] = "go"
    generation: int
    incident: str | None
    env: dict[str, str]
    high_water: int


@dataclass(frozen=True)
class FaultNotice:
    """Generation ``generation`` is over.

    Attributes:
        cause: the cause in one line.
        rank: the rank to blame (None: not known).
    """

    type: ClassVar[str] = "fault"
    generation: int
    incident: str
    cause: str
    rank: int | None


@dataclass(frozen=True)
class Inquire:
    """Ask where the rank's main thread is."""

    type: ClassVar[str] = "inquire"
    id: int


@dataclass(frozen=True)
class Finish:
    """All ranks are done."""

    type: ClassVar[str] = "finish"


RankMessage = Hello | FaultReport | Barrier | Replace | Done | GiveUp | Answer
AgentMessage = Go | FaultNotice | Inquire | Finish
Message = RankMessage | AgentMessage


class Vocabulary:
    """The messages that one side may send: dataclasses of plain values, each with a ``type``.

    Args:
        sender: name of the side that sends the messages, for error messages.
        classes: the dataclasses of the messages.
    """

    def __init__(self, sender: str, *classes: Any) -> None:
        self.sender = sender
        self._classes = {cls.type: cls for cls in classes}
        self._hints = {cls: {each.name: get_type_hints(cls)[each.name] for each in fields(cls)} for cls in classes}

    def decode(self, line: bytes) -> Any:
        """Return the message in ``line``, which may end in a newline.

        Raises:
            ProtocolError: the line is malformed, oversized, of another version, or of a type unknown from this
                sender.
        """
        if len(line) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {len(line)} bytes is over {MAX_MESSAGE_BYTES}")
        try:
            body = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"not a JSON line: {error}") from error
        if not isinstance(body, dict):
            raise ProtocolError("a message is a JSON object")
        version, kind = body.pop("v", None), body.pop("type", None)
        if type(version) is not int or version != PROTOCOL_VERSION:
            raise ProtocolError(f"protocol version {version!r}; this side speaks {PROTOCOL_VERSION}")
        cls = self._classes.get(kind) if isinstance(kind, str) else None
        if cls is None:
            raise ProtocolError(f"unknown message type {kind!r} from the {self.sender}")
        hints = self._hints[cls]
        if body.keys() != hints.keys():
            raise ProtocolError(f"{kind!r} has the fields {sorted(body)}, expected {sorted(hints)}")
        for name, value in body.items():
            if not _fits(value, hints[name]):
                raise ProtocolError(f"{kind!r}: field {name!r} is a {type(value).__name__}")
        return cls(**body)


_VOCABULARIES = {
    Sender.RANK: Vocabulary("rank", Hello, FaultReport, Barrier, Replace, Done, GiveUp, Answer),
    Sender.AGENT: Vocabulary("agent", Go, FaultNotice, Inquire, Finish),
}


def encode(message: Any) -> bytes:
    """Return ``message`` as one line, newline included; texts that are too long lose their middle.

    Args:
        message: a message of any vocabulary.

    Raises:
        ProtocolError: the message is too large although its texts were shortened.
    """
    body: dict[str, Any] = {"v": PROTOCOL_VERSION, "type": message.type}
    body.update({each.name: getattr(message, each.name) for each in fields(message)})
    line = _dump(body)
    while len(line) > MAX_MESSAGE_BYTES:
        texts = {name: value for name, value in body.items() if isinstance(value, str)}
        longest = max(texts, key=lambda name: len(texts[name]))
        if len(texts[longest]) < 1024:
            raise ProtocolError(f"a {message.type!r} message of {len(line)} bytes is over {MAX_MESSAGE_BYTES}")
        body[longest] = _shorten(texts[longest], len(texts[longest]) // 2)
        line = _dump(body)
    return line


def decode(line: bytes, sender: Sender) -> Message:
    """Return the message in ``line``.

    Args:
        line: one line, with or without its newline.
        sender: the side that sent the line.

    Raises:
        ProtocolError: the line is malformed, oversized, of another version, or of a type unknown from this sender.
    """
    message: Message = _VOCABULARIES[sender].decode(line)
    return message


class LineBuffer:
    """Turns the pieces that a socket delivers into whole lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that ``data`` completes, without their newlines.

        Raises:
            ProtocolError: a line is longer than a message may be.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if any(len(line) > MAX_MESSAGE_BYTES for line in (*lines, self._rest)):
            raise ProtocolError(f"a line is over {MAX_MESSAGE_BYTES} bytes")
        return lines


def _dump(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode("ascii") + b"\n"


def _shorten(text: str, length: int) -> str:
    """Cut ``text`` to about ``length`` characters: a third from its start, the rest from its end."""
    head = length // 3
    return f"{text[:head]}\n{_SHORTENED}\n{text[-(length - head - len(_SHORTENED) - 2) :]}"


def _fits(value: object, hint: Any) -> bool:
    if hint == dict[str, str]:
        return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())
    if hint == list[str]:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if hint == list[list[int]]:
        return isinstance(value, list) and all(isinstance(row, list) and all(map(_is_small, row)) for row in value)
    if hint == int | None:
        return value is None or _is_small(value)
    if hint == str | None:
        return value is None or isinstance(value, str)
    if hint is int:
        return _is_small(value)
    return type(value) is hint


def _is_small(value: object) -> bool:
    """Return whether ``value`` is an integer of at most 64 bits: nothing here is larger, and floats cannot be."""
    return type(value) is int and -(1 << 63) <= value < 1 << 63
