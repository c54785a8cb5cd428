"""The messages between a rank and its agent: JSON objects, one per line; nothing is evaluated or unpickled.

msgspec checks what comes in against the types of the message's fields. A rank and its agent are of one
installation; nodes and the coordinator compare their versions when they meet
(:mod:`~checkpointless.launcher.protocol.channel`).

In all messages ``high_water`` is the highest optimizer step that any rank was ever seen to commit; ``committed``
and ``making`` are the last committed step and the one in the making on a rank's board; ``origin`` is the generation
that began from nothing, 0 or that of the last restart of the whole job. -1 means that there is none. ``incident``
is the one that led to the message; at the first start there is none.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, get_args

import msgspec

from checkpointless.launcher.protocol.causes import Cause, Int

MAX_MESSAGE_BYTES = 1 << 20
_SHORTENED = "[... shortened ...]"
_MOST_OF_AN_ERROR = 160
_MOST_CHARACTERS = 48 * 1024  # of a text: a message has two long ones, and a character takes seven bytes at most


class ProtocolError(ValueError):
    """The data received (or to be sent) is not a message of this protocol."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    """A message of any vocabulary: plain values, texts, rows of them, and the name of the message in ``type``."""

    @property
    def type(self) -> str:
        """The name of the message on the wire."""
        return str(self.__struct_config__.tag)


class Hello(Message, frozen=True, tag="hello"):
    """The rank is at the entry of its block and waits for ``go``."""

    generation: Int


class FaultReport(Message, frozen=True, tag="fault"):
    """Something went wrong in a rank: a victim, if the error is a broken collective or store connection."""

    generation: Int
    cause: Cause


class Barrier(Message, frozen=True, tag="barrier"):
    """The rank has left ``generation`` and waits for ``go``; if it is ``unfit``, why it cannot enter again."""

    generation: Int
    unfit: str = ""


class Replace(Message, frozen=True, tag="replace"):
    """The rank's process exits next and asks for a successor.

    If it is ``handed_over``, the successor finds its state in the node's memory.
    """

    generation: Int
    reason: str
    handed_over: bool = False


class Done(Message, frozen=True, tag="done"):
    """The rank's block has returned; it waits for ``finish``, or for ``fault`` if another rank still needs it."""

    generation: Int


class Inexact(Message, frozen=True, tag="inexact"):
    """A step of ``generation`` is not the one that it was before the fault; ``reason`` says in what, in a line."""

    generation: Int
    reason: str


class GiveUp(Message, frozen=True, tag="giveup"):
    """The job cannot continue; ``reason`` is its last message and ``code`` its exit code.

    ``is_lost``: the reason is that no rank holds the state any more, so it could begin again.
    """

    generation: Int
    reason: str
    code: Int = 1
    is_lost: bool = False


class Paused(Message, frozen=True, tag="paused"):
    """The rank stands at the step boundary that all ranks have agreed on, outside of any collective."""

    generation: Int


class Offered(Message, frozen=True, tag="offered"):
    """The rank, which waits at the barrier, offers its state to a successor on another node.

    Attributes:
        source: what the successor needs to fetch it ("": the rank has no state).
        problem: why it cannot be offered ("": it is).
    """

    generation: Int
    source: str
    problem: str = ""


class Answer(Message, frozen=True, tag="answer"):
    """The reply to ``inquire``: where the rank stands.

    Attributes:
        in_collective: whether the main thread waits in a collective.
        is_async: whether collectives return when they have been launched, before the peers have come.
        launched: how many collectives the rank has launched in each of its process groups, by name.
    """

    id: Int
    in_collective: bool
    stack: str
    is_async: bool = False
    launched: dict[str, Int] = {}


class Go(Message, frozen=True, tag="go"):
    """All ranks are present: the rank enters its block."""

    generation: Int
    incident: str | None
    env: dict[str, str]
    high_water: Int
    origin: Int = 0


class FaultNotice(Message, frozen=True, tag="fault"):
    """Generation ``generation`` is over: the coordinator notifies the nodes, and they notify their ranks in it.

    Attributes:
        cause: the cause in one line.
        rank: the rank to blame (None: not known).
    """

    generation: Int
    incident: str
    cause: str
    rank: Int | None


class HandOver(Message, frozen=True, tag="hand-over"):
    """Processes at the barrier after ``generation`` hand their state to successors, and end.

    The coordinator notifies the nodes, and they notify their ranks.
    """

    generation: Int
    high_water: Int
    ranks: list[Int]


class Pause(Message, frozen=True, tag="pause"):
    """The ranks of ``generation`` agree on the next step boundary, and wait there to be interrupted.

    The coordinator sends it to the nodes, and they to their ranks; one rank that knows of it is enough.
    """

    generation: Int


class Offer(Message, frozen=True, tag="offer"):
    """Processes at the barrier after ``generation`` offer their state over the network, and go on waiting.

    Attributes:
        address: where to listen; the node fills it in.
    """

    generation: Int
    high_water: Int
    ranks: list[Int]
    address: str = ""


class Inquire(Message, frozen=True, tag="inquire"):
    """Ask where the rank's main thread is."""

    id: Int


class Finish(Message, frozen=True, tag="finish"):
    """All ranks are done; for one that waits at the barrier: a successor on another node has taken its place."""


class Ending(Message, frozen=True, tag="ending"):
    """The job is ending: a block that has returned is let go, and none is entered again."""


RankMessage = Hello | FaultReport | Barrier | Replace | Done | Inexact | GiveUp | Paused | Offered | Answer
AgentMessage = Go | FaultNotice | HandOver | Pause | Offer | Inquire | Finish | Ending


class Vocabulary:
    """The messages that one side may send."""

    def __init__(self, sender: str, *classes: type[Message]) -> None:
        self._sender = sender
        self._decoder = msgspec.json.Decoder(functools.reduce(operator.or_, classes))

    def decode(self, line: bytes) -> Any:  # Any: a message of one of the classes
        """Return the message in ``line``, which may end in a newline.

        Raises:
            ProtocolError: the line is malformed, oversized, or not a message of this sender.
        """
        if len(line) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {len(line)} bytes is over {MAX_MESSAGE_BYTES}")
        try:
            return self._decoder.decode(line)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"not a message of the {self._sender}: {str(error)[:_MOST_OF_AN_ERROR]}") from error


FROM_RANK = Vocabulary("rank", *get_args(RankMessage))
FROM_AGENT = Vocabulary("agent", *get_args(AgentMessage))


def encode(message: Message) -> bytes:
    """Return ``message`` as one line, newline included; texts that are too long lose their middle.

    Raises:
        ProtocolError: the message is too large all the same.
    """
    line = msgspec.json.encode(_sendable(msgspec.to_builtins(message, enc_hook=_sendable)))
    if len(line) >= MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a {message.type!r} message of {len(line)} bytes is over {MAX_MESSAGE_BYTES}")
    return line + b"\n"


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


def _sendable(value: Any) -> Any:
    """Return plain data with texts that are plain, of a bounded length, and UTF-8; other characters are escaped."""
    if isinstance(value, str):  # str() of an exception is whatever its ``__str__`` returns
        text = str.__str__(value)
        text = text if len(text) <= _MOST_CHARACTERS else _shorten(text, _MOST_CHARACTERS)
        return text.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_sendable(name): _sendable(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_sendable(each) for each in value]
    return value


def _shorten(text: str, length: int) -> str:
    """Cut ``text`` to about ``length`` characters: a third from its start, the rest from its end."""
    head = length // 3
    return f"{text[:head]}\n{_SHORTENED}\n{text[-(length - head - len(_SHORTENED) - 2) :]}"
