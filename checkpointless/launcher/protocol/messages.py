"""The messages between ranks, agents and the coordinator: lines of JSON; nothing is evaluated or unpickled.

The coordinator decides which ranks belong together, when a generation begins and ends, which ranks and nodes are
replaced, and when the job is over. A node's agent starts and ends processes, passes on what its ranks say, and
manages their boards. What it passes on is one message for all, in either direction.

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
from enum import Enum
from typing import Annotated, Any, get_args

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


class RankState(Enum):
    """The state of a rank."""

    STARTING = "starting"  # its process was started but has not said hello
    READY = "ready"  # at the barrier
    RUNNING = "running"  # in its block
    LEAVING = "leaving"  # was told of a fault and is not at the barrier yet
    DONE = "done"  # its block has returned
    FINISHED = "finished"  # every rank's block has returned
    GONE = "gone"  # its process has ended


IN_BLOCK = (RankState.RUNNING, RankState.DONE)

COUNTED = (RankState.READY, *IN_BLOCK, RankState.LEAVING)  # the end of their process is a fault


class RankStanding(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a rank stands."""

    number: Int
    incarnation: Int
    state: RankState
    committed: Int
    making: Int


class SilentRank(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A rank that shows no progress."""

    number: Int
    beat: Int
    age_ms: Int  # since the beat changed, without the time in which the agent did not run
    quiet_ms: Int  # all time since the beat changed
    making: Int
    in_step: bool  # whether the rank is in the step in the making; otherwise it is between two steps
    letter: Annotated[int, msgspec.Meta(ge=0, lt=128)]  # as in ``ProcessLook``, like ``cpu_ms``
    cpu_ms: Int


class RankPace(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a rank does by itself in a step: medians of its newest steps, in microseconds."""

    number: Int
    role: Int  # ranks of the same role do the same work
    steps: Int  # how many steps were measured in this generation
    own_us: Int  # without waits for other ranks
    spread_us: Int  # how far steps are from it, as a standard deviation that a few steps do not change
    data_us: Int  # how much of it goes by until the batch is there


# ---- what a rank says


class _OfRank(Message, frozen=True, kw_only=True):
    """What a rank says, or what becomes of it; its agent adds which process that is and what its board shows."""

    rank: Int = -1
    incarnation: Int = -1
    committed: Int = -1
    making: Int = -1


class Hello(_OfRank, frozen=True, tag="hello"):
    """The rank is at the entry of its block and waits for ``go``."""

    generation: Int


class FaultReport(_OfRank, frozen=True, tag="fault"):
    """Something went wrong in a rank: a victim, if the error is a broken collective or store connection."""

    generation: Int
    cause: Cause


class Barrier(_OfRank, frozen=True, tag="barrier"):
    """The rank has left ``generation`` and waits for ``go``; if it is ``unfit``, why it cannot enter again."""

    generation: Int
    unfit: str = ""


class Replace(Message, frozen=True, tag="replace"):
    """The rank's process exits next and asks for a successor."""

    generation: Int
    reason: str
    handed_over: bool = False  # whether the successor finds its state in the node's memory


class Done(_OfRank, frozen=True, tag="done"):
    """The rank's block has returned; it waits for ``finish``, or for ``fault`` if another rank still needs it."""

    generation: Int


class Inexact(_OfRank, frozen=True, tag="inexact"):
    """A step of ``generation`` is not the one that it was before the fault; ``reason`` says in what, in a line."""

    generation: Int
    reason: str


class GiveUp(Message, frozen=True, tag="giveup"):
    """The job cannot continue; ``reason`` is its last message and ``code`` its exit code."""

    generation: Int  # which one the reason is about (-1: the job as a whole, since a node can open no store)
    reason: str
    code: Int = 1
    is_lost: bool = False  # whether no rank holds the state any more, so that the job could begin again


class Paused(_OfRank, frozen=True, tag="paused"):
    """The rank stands at the step boundary that all ranks have agreed on, outside of any collective."""

    generation: Int


class Offered(_OfRank, frozen=True, tag="offered"):
    """The rank, which waits at the barrier, offers its state to a successor on another node."""

    generation: Int
    source: str  # what the successor needs to fetch it ("": the rank has no state)
    problem: str = ""  # why it cannot be offered ("": it is)


class Answer(_OfRank, frozen=True, tag="answer"):
    """The reply to ``inquire``: where the rank stands."""

    id: Int
    in_collective: bool  # whether the main thread waits in a collective
    stack: str
    is_async: bool = False  # whether collectives return when they have been launched, before the peers have come
    launched: dict[str, Int] = {}  # how many collectives it has launched in each process group, by name


# ---- what it hears: most of it from the coordinator, through its agent


class Go(Message, frozen=True, tag="go"):
    """All ranks are present: they enter their block."""

    generation: Int
    incident: str | None
    env: dict[str, str]
    high_water: Int
    target: Int = -1  # the step that the nodes report at once when it is reached
    origin: Int = 0
    sources: dict[str, str] = {}  # from where ranks that have moved fetch their state, by rank; each gets its own


class FaultNotice(Message, frozen=True, tag="fault"):
    """Generation ``generation`` is over, for the ranks in it."""

    generation: Int
    incident: str
    cause: str  # the cause in one line
    rank: Int | None  # the rank to blame (None: not known)


class HandOver(Message, frozen=True, tag="hand-over"):
    """Processes at the barrier after ``generation`` hand their state to successors, and end."""

    generation: Int
    high_water: Int
    ranks: list[Int]


class Pause(Message, frozen=True, tag="pause"):
    """The ranks of ``generation``, of which one that knows of it is enough, agree on a step boundary to wait at."""

    generation: Int


class Offer(Message, frozen=True, tag="offer"):
    """Processes at the barrier after ``generation`` offer their state over the network, and go on waiting."""

    generation: Int
    high_water: Int
    ranks: list[Int]
    address: str = ""  # where to listen; the node fills it in


class Inquire(Message, frozen=True, tag="inquire"):
    """Ask where the main threads of ``ranks`` are."""

    id: Int
    ranks: list[Int] = []


class Finish(Message, frozen=True, tag="finish"):
    """All ranks are done; for one that waits at the barrier: a successor on another node has taken its place."""


class Ending(Message, frozen=True, tag="ending"):
    """The job is ending: a block that has returned is let go, and none is entered again."""


# ---- what else a node says


class Joined(Message, frozen=True, tag="joined"):
    """The node can start processes now."""


class Standing(Message, frozen=True, tag="standing"):
    """The node already runs ranks; a coordinator that has just begun needs to know this about them."""

    generation: Int
    incident: Int  # number of the last incident that the node heard of (0: none)
    high_water: Int
    run_id: str
    finished: bool  # whether every rank's block has returned
    ranks: list[RankStanding]


class StoreOpened(Message, frozen=True, tag="store"):
    """The node has opened the store of ``generation``."""

    generation: Int
    address: str
    port: Int


class RankEnded(_OfRank, frozen=True, tag="ended"):
    """A rank's process has ended."""

    code: Int  # exit code of the process, or minus the number of the signal that killed it
    forgiven: bool  # whether the end of the process follows from what is known already
    log_path: str
    last_lines: list[str]
    was_started: bool = True  # False if it was still held back because of its device
    handed_over: bool = False


class DeviceBad(Message, frozen=True, tag="device"):
    """The process of ``rank`` was not started, because its device must not be used."""

    rank: Int
    incarnation: Int
    why: str


class MoveWanted(Message, frozen=True, tag="move-wanted"):
    """A spare is to take the ranks of a node over, as that asks for itself, or an operator for any."""

    reason: str  # for people
    node: Int = -1  # of an operator; -1 if it names a ``rank`` of the node
    rank: Int = -1


class Silent(Message, frozen=True, tag="silent"):
    """Lists the ranks of the node that have shown no progress for a good part of their limit (empty: no more)."""

    ranks: list[SilentRank]


class Progress(Message, frozen=True, tag="progress"):
    """Reports how far the ranks of the node have come."""

    oldest: Int
    newest: Int
    making: Int
    longest_ms: Int  # the longest time between two beats within a step of this generation (0: not known)
    pause_ms: Int = 0  # the same outside of a step, since this agent began
    shows: bool = True  # whether any rank has ever shown progress after it entered its block
    began_after: Int = -1  # the newest step whose state a rank's training began with in ``generation``
    generation: Int = -1


class Paces(Message, frozen=True, tag="paces"):
    """Says what the ranks of the node do by themselves in a step of ``generation``, as far as that is measured."""

    generation: Int
    ranks: list[RankPace]


class Holding(Message, frozen=True, tag="holding"):
    """Says, for each rank of the node in their order, the first of the ranks that hold the same state."""

    shards: list[Int]


class Alive(Message, frozen=True, tag="alive"):
    """This side of the connection is still alive, and has nothing else to say."""


class Searching(Message, frozen=True, tag="searching"):
    """The node has not heard from the coordinator for too long: its ranks continue, and it connects again."""


class Leaving(Message, frozen=True, tag="leaving"):
    """The node no longer takes part: its agent was asked to stop, or can no longer start processes."""

    reason: str


# ---- what else it hears


class Spawn(Message, frozen=True, tag="spawn"):
    """Start a process for ``rank``."""

    rank: Int
    incarnation: Int
    generation: Int
    incident: str
    env: dict[str, str]  # of its environment variables those that not all ranks of the node get
    anyway: bool = False  # whether to start it although its device is bad
    afresh: bool = False  # whether the job begins again, so that nothing of the rank's earlier processes counts


class OpenStore(Message, frozen=True, tag="open-store"):
    """Open a store for ``generation``, and close the previous one."""

    generation: Int


class Discard(Message, frozen=True, tag="discard"):
    """End the ranks of this node, and join as a node that has none."""

    moved: bool = False  # whether successors on another node have taken their place; else they were declared dead


class Displaced(Message, frozen=True, tag="displaced"):
    """Another node has taken this node's place; its processes only offer their state, until ``Discard``."""


class MoveNews(Message, frozen=True, tag="move-news"):
    """What becomes of a move, for who has asked for it; it is the last line if ``is_over``."""

    line: str
    is_over: bool
    is_moved: bool = False


class Kill(Message, frozen=True, tag="kill"):
    """End the process of ``rank`` if no generation after ``generation`` has begun; that is no fault by itself."""

    rank: Int
    incarnation: Int
    generation: Int
    beat: Int = -1  # if there is one, only if the process's main thread is still stuck at it


class OneEnded(Message, frozen=True, tag="one-ended"):
    """``rank``, of any node, is the first whose process has ended well since the job began, or began again."""

    rank: Int


class End(Message, frozen=True, tag="end"):
    """The job is over."""

    code: Int
    last_words: list[str]


RankMessage = Hello | FaultReport | Barrier | Replace | Done | Inexact | GiveUp | Paused | Offered | Answer
AgentMessage = Go | FaultNotice | HandOver | Pause | Offer | Inquire | Finish | Ending
PassedOn = Hello | Barrier | FaultReport | Done | Inexact | Paused | Offered | Answer
NodeMessage = (
    (PassedOn | GiveUp)
    | (Joined | Standing | StoreOpened | RankEnded | DeviceBad | MoveWanted | Silent | Progress | Paces | Holding)
    | (Searching | Leaving | Alive)
)
Command = (Go | FaultNotice | HandOver | Pause | Offer | Inquire | Finish) | (
    Spawn | OpenStore | Discard | Displaced | MoveNews | Kill | OneEnded | End | Alive
)


class Vocabulary:
    """The messages that one side may send."""

    def __init__(self, sender: str, *classes: type[Message]) -> None:
        self._sender = sender
        self._decoder = msgspec.json.Decoder(functools.reduce(operator.or_, classes))

    def decode(self, line: bytes) -> Any:  # Any: a message of one of the classes
        """Return the message in ``line``; ``ProtocolError`` if it is malformed, oversized, or another sender's."""
        if len(line) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {len(line)} bytes is over {MAX_MESSAGE_BYTES}")
        try:
            return self._decoder.decode(line)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"not a message of the {self._sender}: {str(error)[:_MOST_OF_AN_ERROR]}") from error


FROM_RANK = Vocabulary("rank", *get_args(RankMessage))
FROM_AGENT = Vocabulary("agent", *get_args(AgentMessage))
FROM_NODE = Vocabulary("node", *get_args(NodeMessage))
FROM_COORDINATOR = Vocabulary("coordinator", *get_args(Command))
FROM_OPERATOR = Vocabulary("operator", MoveWanted)


def encode(message: Message) -> bytes:
    """Return ``message`` as a line; texts lose their middle, or ``ProtocolError`` is raised, if it is too long."""
    line = msgspec.json.encode(_sendable(msgspec.to_builtins(message, enc_hook=_sendable)))
    if len(line) >= MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a {message.type!r} message of {len(line)} bytes is over {MAX_MESSAGE_BYTES}")
    return line + b"\n"


class LineBuffer:
    """Turns the pieces that a socket delivers into whole lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that ``data`` completes, without newlines; ``ProtocolError`` if one is too long."""
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
