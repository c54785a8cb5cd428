"""The messages between the agent of a node and the coordinator of the job: plain data, as between rank and agent.

The coordinator decides which ranks belong together, when a generation begins and ends, which ranks and nodes are
replaced, and when the job is over. A node's agent starts and ends processes, passes on what its ranks say, and
manages their boards.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, get_args

import msgspec

from checkpointless.launcher.protocol.causes import Cause, Int
from checkpointless.launcher.protocol.messages import (
    Answer,
    FaultNotice,
    HandOver,
    Message,
    Offer,
    Pause,
    Vocabulary,
)


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
    """A rank that shows no progress.

    Attributes:
        age_ms: since the beat changed, without the time in which the agent did not run.
        quiet_ms: all time since the beat changed.
        in_step: whether the rank is in the step in the making; otherwise it is between two steps.
        letter, cpu_ms: as in :class:`~checkpointless.system.process_tree.ProcessLook`.
    """

    number: Int
    beat: Int
    age_ms: Int
    quiet_ms: Int
    making: Int
    in_step: bool
    letter: Annotated[int, msgspec.Meta(ge=0, lt=128)]
    cpu_ms: Int


class RankPace(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a rank does by itself in a step: medians of its newest steps, in microseconds.

    Attributes:
        role: ranks of the same role do the same work.
        steps: how many steps were measured in this generation.
        own_us: without waits for other ranks.
        spread_us: how far steps are from it, as a standard deviation that a few steps do not change.
        data_us: how much of it goes by until the batch is there.
    """

    number: Int
    role: Int
    steps: Int
    own_us: Int
    spread_us: Int
    data_us: Int


class Joined(Message, frozen=True, tag="joined"):
    """The node can start processes now."""


class Standing(Message, frozen=True, tag="standing"):
    """The node already runs ranks; a coordinator that has just begun needs to know this about them.

    Attributes:
        incident: number of the last incident that the node heard of (0: none).
        finished: whether every rank's block has returned.
    """

    generation: Int
    incident: Int
    high_water: Int
    run_id: str
    finished: bool
    ranks: list[RankStanding]


class StoreOpened(Message, frozen=True, tag="store"):
    """The node has opened the store of ``generation``."""

    generation: Int
    address: str
    port: Int


class RankReady(Message, frozen=True, tag="ready"):
    """A rank is at the barrier; ``unfit`` says why its process cannot enter its block again ("": it can)."""

    rank: Int
    incarnation: Int
    committed: Int
    making: Int
    entered: bool = False
    unfit: str = ""


class Trouble(Message, frozen=True, tag="trouble"):
    """Something went wrong with a rank in ``generation``; the cause names one that the node runs."""

    generation: Int
    cause: Cause
    committed: Int
    making: Int

    def __post_init__(self) -> None:
        if self.cause.rank is None:
            raise ValueError("trouble is that of a rank")

    @property
    def rank(self) -> int:
        """The rank at fault."""
        assert self.cause.rank is not None
        return self.cause.rank


class RankEnded(Message, frozen=True, tag="ended"):
    """A rank's process has ended.

    Attributes:
        code: exit code of the process, or minus the number of the signal that killed it.
        forgiven: whether the end of the process follows from what is known already.
        was_started: False if it was still held back because of its device.
    """

    rank: Int
    incarnation: Int
    code: Int
    forgiven: bool
    committed: Int
    making: Int
    log_path: str
    last_lines: list[str]
    was_started: bool = True
    handed_over: bool = False


class DeviceBad(Message, frozen=True, tag="device"):
    """The process of ``rank`` was not started, because its device must not be used."""

    rank: Int
    incarnation: Int
    why: str


class RankDone(Message, frozen=True, tag="rank-done"):
    """The block of a rank has returned in ``generation``."""

    rank: Int
    generation: Int
    committed: Int = -1
    making: Int = -1


class RankInexact(Message, frozen=True, tag="rank-inexact"):
    """A step that ``rank`` makes again in ``generation`` is not the one that it was; ``reason`` says in what."""

    rank: Int
    generation: Int
    reason: str


class RankPaused(Message, frozen=True, tag="rank-paused"):
    """A rank stands at the agreed step boundary of ``generation``."""

    rank: Int
    generation: Int


class RankOffered(Message, frozen=True, tag="rank-offered"):
    """A rank at the barrier offers its state; the fields are those of the rank's ``offered``."""

    rank: Int
    incarnation: Int
    source: str
    problem: str = ""


class MoveWanted(Message, frozen=True, tag="move-wanted"):
    """The node asks for a spare to take its ranks over; ``reason`` is for people."""

    reason: str


class Answered(Message, frozen=True, tag="answered"):
    """A rank has answered an inquiry."""

    rank: Int
    answer: Answer


class Silent(Message, frozen=True, tag="silent"):
    """Lists the ranks of the node that have shown no progress for a good part of their limit (empty: no more)."""

    ranks: list[SilentRank]


class Progress(Message, frozen=True, tag="progress"):
    """Reports how far the ranks of the node have come.

    Attributes:
        longest_ms: the longest time that a rank took from one beat to the next within a step of this generation (0:
            not known yet).
        pause_ms: the same outside of a step, since this agent began.
        shows: whether any rank has ever shown progress after it entered its block.
        began_after: the newest step whose state a rank's training began with in ``generation``.
    """

    oldest: Int
    newest: Int
    making: Int
    longest_ms: Int
    pause_ms: Int = 0
    shows: bool = True
    began_after: Int = -1
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


class JobOver(Message, frozen=True, tag="over"):
    """The job cannot continue: a rank gave it up, or a node cannot open a store; ``code`` is its exit code.

    Attributes:
        generation: the generation that the reason is about (-1: the job as a whole).
        is_lost: whether the reason is that no rank holds the state any more.
    """

    reason: str
    code: Int = 1
    generation: Int = -1
    is_lost: bool = False


class Leaving(Message, frozen=True, tag="leaving"):
    """The node no longer takes part: its agent was asked to stop, or can no longer start processes."""

    reason: str


class Spawn(Message, frozen=True, tag="spawn"):
    """Start a process for ``rank``.

    Attributes:
        env: environment variables of the process, besides those that all ranks of the node get.
        anyway: whether to start it although its device is bad.
        afresh: whether the job begins again, so that nothing of the rank's earlier processes counts.
    """

    rank: Int
    incarnation: Int
    generation: Int
    incident: str
    env: dict[str, str]
    anyway: bool = False
    afresh: bool = False


class OpenStore(Message, frozen=True, tag="open-store"):
    """Open a store for ``generation``, and close the previous one."""

    generation: Int


class Discard(Message, frozen=True, tag="discard"):
    """End the ranks of this node, and join as a node that has none.

    They were declared dead; or, if they ``moved``, successors on another node have taken their place.
    """

    moved: bool = False


class Displaced(Message, frozen=True, tag="displaced"):
    """Another node has taken this node's place; its processes only offer their state, until ``Discard``."""


class MoveRefused(Message, frozen=True, tag="move-refused"):
    """The node's ranks stay where they are, and why; training goes on."""

    reason: str


class Begin(Message, frozen=True, tag="begin"):
    """All ranks are present: let those of the node enter their block; ``target`` is reported when reached.

    ``sources`` is from where ranks that have moved fetch their state, by rank; each rank hears only of its own.
    """

    generation: Int
    incident: str
    env: dict[str, str]
    high_water: Int
    target: Int
    origin: Int = 0
    sources: dict[str, str] = {}


class Ask(Message, frozen=True, tag="ask"):
    """Ask ``ranks`` where their main threads are."""

    id: Int
    ranks: list[Int]


class Kill(Message, frozen=True, tag="kill"):
    """End the process of ``rank`` if no generation after ``generation`` has begun; its end is no fault by itself.

    With a ``beat``, it is ended only if its main thread is still stuck at it.
    """

    rank: Int
    incarnation: Int
    generation: Int
    beat: Int = -1


class AllDone(Message, frozen=True, tag="all-done"):
    """Every rank's block has returned."""


class OneEnded(Message, frozen=True, tag="one-ended"):
    """``rank``, of any node, is the first whose process has ended well since the job began, or began again."""

    rank: Int


class End(Message, frozen=True, tag="end"):
    """The job is over."""

    code: Int
    last_words: list[str]


NodeMessage = (
    Joined
    | Standing
    | StoreOpened
    | RankReady
    | Trouble
    | RankEnded
    | DeviceBad
    | RankDone
    | RankInexact
    | RankPaused
    | RankOffered
    | MoveWanted
    | Answered
    | Silent
    | Progress
    | Holding
    | Paces
    | JobOver
    | Searching
    | Leaving
    | Alive
)
Command = (
    Spawn
    | OpenStore
    | Discard
    | Displaced
    | Begin
    | FaultNotice
    | HandOver
    | Pause
    | Offer
    | MoveRefused
    | Ask
    | Kill
    | AllDone
    | OneEnded
    | End
    | Alive
)


class MoveNode(Message, frozen=True, tag="move"):
    """An operator has a spare take the ranks of ``node`` over, or of the node of ``rank``; the other is -1."""

    node: Int
    rank: Int


class MoveNews(Message, frozen=True, tag="move-news"):
    """What becomes of a move that an operator has asked for; it is the last line if ``is_over``."""

    line: str
    is_over: bool
    is_moved: bool = False


FROM_OPERATOR = Vocabulary("operator", MoveNode)
FOR_OPERATOR = Vocabulary("coordinator", MoveNews)

FROM_NODE = Vocabulary("node", *get_args(NodeMessage))
FROM_COORDINATOR = Vocabulary("coordinator", *get_args(Command))
