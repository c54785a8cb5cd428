"""The messages between the agent of a node and the coordinator of the job: plain data, as between rank and agent.

The coordinator decides which ranks belong together, when a generation begins and ends, which ranks and nodes are
replaced, and when the job is over. A node's agent starts and ends processes, passes on what its ranks say, and
manages their boards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

from checkpointless.wire.causes import Cause, CauseKind
from checkpointless.wire.messages import Vocabulary
from checkpointless.wire.rank_state import RankState

STATES = tuple(RankState)


@dataclass(frozen=True)
class Joined:
    """The node can start processes now."""

    type: ClassVar[str] = "joined"


@dataclass(frozen=True)
class Standing:
    """The node already runs ranks; a coordinator that has just begun needs to know this about them.

    Attributes:
        generation: the generation that began last on this node (-1: none).
        incident: number of the last incident that the node heard of (0: none).
        high_water: the highest optimizer step that any rank has committed, as the node was told (-1: none).
        run_id: the job's run ID.
        finished: whether every rank's block has returned.
        ranks: for each rank its number, its incarnation, the index of its state in :data:`STATES`, and the
            committed step and the step in the making on its board (-1: none).
    """

    type: ClassVar[str] = "standing"
    generation: int
    incident: int
    high_water: int
    run_id: str
    finished: bool
    ranks: list[list[int]]


@dataclass(frozen=True)
class StoreOpened:
    """The node has opened the store of ``generation``.

    Attributes:
        address: numeric address of the node, as the other nodes reach it.
    """

    type: ClassVar[str] = "store"
    generation: int
    address: str
    port: int


@dataclass(frozen=True)
class RankReady:
    """A rank is at the barrier.

    Attributes:
        incarnation: incarnation of the rank's process.
        pid: process ID of the rank.
        committed: the last committed optimizer step on the rank's board (-1: none).
        making: the step in the making on the rank's board (-1: none).
    """

    type: ClassVar[str] = "ready"
    rank: int
    incarnation: int
    pid: int
    committed: int
    making: int


@dataclass(frozen=True)
class Trouble:
    """Something went wrong with a rank in ``generation``: a :class:`~checkpointless.wire.causes.Cause`.

    Attributes:
        kind: number of the cause's ``CauseKind``.
        committed: the last committed optimizer step on the rank's board.
        making: the step in the making on the rank's board.
    """

    type: ClassVar[str] = "trouble"
    generation: int
    rank: int
    kind: int
    how: str
    what: str
    step: int
    detail: str
    error: str
    message: str
    traceback: str
    committed: int
    making: int

    @classmethod
    def of(cls, generation: int, rank: int, cause: Cause, committed: int, making: int) -> Trouble:
        """Return the message that reports ``cause``."""
        return cls(
            generation,
            rank,
            int(cause.kind),
            cause.how,
            cause.what,
            cause.step,
            cause.detail,
            cause.error,
            cause.message,
            cause.traceback,
            committed,
            making,
        )

    @property
    def cause(self) -> Cause:
        """What went wrong.

        Raises:
            ValueError: there is no ``CauseKind`` with this number.
        """
        return Cause(
            CauseKind(self.kind),
            self.rank,
            self.how,
            self.what,
            self.step,
            self.detail,
            self.error,
            self.message,
            self.traceback,
        )


@dataclass(frozen=True)
class RankEnded:
    """A rank's process has ended.

    Attributes:
        code: exit code of the process, or minus the number of the signal that killed it.
        forgiven: whether the end of the process follows from what is known already.
        committed: the last committed optimizer step on the rank's board.
        making: the step in the making on the rank's board.
        log_path: path of the rank's log.
        last_lines: the last lines of the rank's log.
    """

    type: ClassVar[str] = "ended"
    rank: int
    incarnation: int
    code: int
    forgiven: bool
    committed: int
    making: int
    log_path: str
    last_lines: list[str]


@dataclass(frozen=True)
class RankDone:
    """The block of a rank has returned in ``generation``."""

    type: ClassVar[str] = "rank-done"
    rank: int
    generation: int


@dataclass(frozen=True)
class Answered:
    """A rank has answered the inquiry ``id``."""

    type: ClassVar[str] = "answered"
    id: int
    rank: int
    in_collective: bool
    stack: str


@dataclass(frozen=True)
class Silent:
    """Lists the ranks of the node that have shown no progress for a good part of their limit.

    Attributes:
        ranks: for each silent rank its number, its beat, the milliseconds since the beat changed, the step in the
            making, whether the rank is in that step (1) or between two steps (0), and a
            :class:`~checkpointless.posix.process_state.ProcessLook`: the code of its process's state and the
            milliseconds of processor time that the process has used. Empty once no rank is silent any more.
    """

    type: ClassVar[str] = "silent"
    ranks: list[list[int]]


@dataclass(frozen=True)
class Progress:
    """Reports how far the ranks of the node have come.

    Attributes:
        oldest: the smallest committed optimizer step on their boards.
        newest: the largest committed optimizer step on their boards.
        making: the largest step in the making on their boards.
        longest_ms: the longest time in milliseconds that a rank took from one beat to the next within a step of
            this generation (0: not known yet).
        pause_ms: the longest time in milliseconds that a rank took from one beat to the next outside of a step,
            since this agent began.
        shows: whether any rank has ever shown progress after it entered its block.
    """

    type: ClassVar[str] = "progress"
    oldest: int
    newest: int
    making: int
    longest_ms: int
    pause_ms: int = 0
    shows: bool = True


@dataclass(frozen=True)
class Alive:
    """This side of the connection is still alive, and has nothing else to say."""

    type: ClassVar[str] = "alive"


@dataclass(frozen=True)
class Searching:
    """The node has not heard from the coordinator for too long: its ranks continue, and it connects again."""

    type: ClassVar[str] = "searching"


@dataclass(frozen=True)
class JobOver:
    """The job cannot continue: a rank gave it up, or a node cannot open a store; ``code`` is its exit code."""

    type: ClassVar[str] = "over"
    reason: str
    code: int = 1


@dataclass(frozen=True)
class Leaving:
    """The node no longer takes part: its agent was told to stop, or can no longer start processes."""

    type: ClassVar[str] = "leaving"
    reason: str


@dataclass(frozen=True)
class Spawn:
    """Start a process for ``rank``.

    Attributes:
        incarnation: 0 for the rank's first process, +1 at each respawn.
        generation: the generation that the process will join.
        incident: the incident that the start belongs to ("" at the first start).
        env: environment variables of the process, besides those that all ranks of the node get.
    """

    type: ClassVar[str] = "spawn"
    rank: int
    incarnation: int
    generation: int
    incident: str
    env: dict[str, str]


@dataclass(frozen=True)
class OpenStore:
    """Open a store for ``generation``, and close the previous one."""

    type: ClassVar[str] = "open-store"
    generation: int


@dataclass(frozen=True)
class Discard:
    """End the ranks of this node, which were taken for dead, and join as a node that has none."""

    type: ClassVar[str] = "discard"


@dataclass(frozen=True)
class Begin:
    """All ranks are present: let the ranks of the node enter their block.

    Attributes:
        incident: the incident that led here ("" at the first start).
        env: variables to put into the ranks' environment.
        high_water: the highest optimizer step that any rank was ever seen to commit (-1: none).
        target: the step that was in the making; progress to it must be reported at once (-1: none).
    """

    type: ClassVar[str] = "begin"
    generation: int
    incident: str
    env: dict[str, str]
    high_water: int
    target: int


@dataclass(frozen=True)
class Interrupt:
    """``generation`` is over: tell every rank that is in it.

    Attributes:
        culprit: the rank to blame (-1: not known).
    """

    type: ClassVar[str] = "interrupt"
    generation: int
    incident: str
    cause: str
    culprit: int


@dataclass(frozen=True)
class Ask:
    """Ask ``ranks`` where their main threads are."""

    type: ClassVar[str] = "ask"
    id: int
    ranks: list[list[int]]


@dataclass(frozen=True)
class Kill:
    """End the process of ``rank`` if no generation after ``generation`` has begun; its end is no fault by itself.

    Attributes:
        beat: the process is ended only if its main thread is still stuck at this beat (-1: in any case).
    """

    type: ClassVar[str] = "kill"
    rank: int
    incarnation: int
    generation: int
    beat: int = -1


@dataclass(frozen=True)
class AllDone:
    """Every rank's block has returned."""

    type: ClassVar[str] = "all-done"


@dataclass(frozen=True)
class End:
    """The job is over.

    Attributes:
        code: exit code of the agent.
        last_words: lines that the agent prints at the end.
    """

    type: ClassVar[str] = "end"
    code: int
    last_words: list[str]


NodeMessage = (
    Joined
    | Standing
    | StoreOpened
    | RankReady
    | Trouble
    | RankEnded
    | RankDone
    | Answered
    | Silent
    | Progress
    | JobOver
    | Searching
    | Leaving
    | Alive
)
Command = Spawn | OpenStore | Discard | Begin | Interrupt | Ask | Kill | AllDone | End | Alive

FROM_NODE = Vocabulary("node", *get_args(NodeMessage))
FROM_COORDINATOR = Vocabulary("coordinator", *get_args(Command))
