"""The messages between the agent of a node and the coordinator of the job: plain data, as between rank and agent.

The coordinator decides: who belongs together, when a generation begins and ends, who is replaced, when the job is
over. A node's agent starts and ends processes, passes on what its ranks say, and looks after their boards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

from checkpointless.agent.incidents import Cause, CauseKind
from checkpointless.agent.protocol import Vocabulary
from checkpointless.agent.workers import WorkerState

STATES = tuple(WorkerState)


@dataclass(frozen=True)
class Joined:
    """The node can start processes now."""

    type: ClassVar[str] = "joined"


@dataclass(frozen=True)
class Standing:
    """The node runs ranks already: what a coordinator that has just begun needs to know of them.

    Attributes:
        generation: the one that began last on this node (-1: none).
        incident: the number of the last incident that it heard of (0: none).
        high_water: the highest optimizer step that it was told any rank has committed (-1: none).
        run_id: of the job.
        finished: whether every rank's block has returned.
        ranks: for each its number, its incarnation, the index of its state in :data:`STATES`, and its board's
            committed step and step in the making (-1: none).
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
    """The node has the store of ``generation``.

    Attributes:
        address: of the node, a number, as the others reach it.
    """

    type: ClassVar[str] = "store"
    generation: int
    address: str
    port: int


@dataclass(frozen=True)
class RankReady:
    """A rank is at the barrier.

    Attributes:
        incarnation: of its process.
        pid: of its process.
        committed: the last optimizer step on its board (-1: none).
        making: the step in the making on its board (-1: none).
    """

    type: ClassVar[str] = "ready"
    rank: int
    incarnation: int
    pid: int
    committed: int
    making: int


@dataclass(frozen=True)
class Trouble:
    """Something went wrong with a rank in ``generation``: a :class:`~checkpointless.agent.incidents.Cause`.

    Attributes:
        kind: the number of its ``CauseKind``.
        committed: the last optimizer step on the rank's board.
        making: the step in the making on its board.
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
        """What a node says of ``cause``."""
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
            ValueError: there is no such kind.
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
        code: its exit code, or minus the number of the signal that killed it.
        forgiven: whether its end follows from what is known already.
        committed: the last optimizer step on its board.
        making: the step in the making on its board.
        log_path: of the rank.
        last_lines: the end of that log.
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
    """The block of a rank returned in ``generation``."""

    type: ClassVar[str] = "rank-done"
    rank: int
    generation: int


@dataclass(frozen=True)
class Answered:
    """A rank answered the inquiry ``id``."""

    type: ClassVar[str] = "answered"
    id: int
    rank: int
    in_collective: bool
    stack: str


@dataclass(frozen=True)
class Silent:
    """The ranks of the node that have shown no progress for a good part of the limit; nobody, when that is over.

    Attributes:
        ranks: for each its number, its beat, the milliseconds since it changed, the step in the making, whether it
            is in that step (1) or between two of them (0), and a
            :class:`~checkpointless.agent.process_state.ProcessLook`: the code of its process's state and the
            milliseconds of processor time that it has used.
    """

    type: ClassVar[str] = "silent"
    ranks: list[list[int]]


@dataclass(frozen=True)
class Progress:
    """Where the ranks of the node stand.

    Attributes:
        oldest: the smallest committed optimizer step on their boards.
        newest: the largest.
        making: the largest step in the making.
        longest_ms: the longest that a rank took from one beat to the next in a step of this generation (0: not
            known yet).
        pause_ms: likewise outside of a step, since this agent began.
        shows: whether a rank has ever beaten after the entry of its block.
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
    """Nothing to say: this side of the connection is still there."""

    type: ClassVar[str] = "alive"


@dataclass(frozen=True)
class Searching:
    """The node has heard nothing of the coordinator for too long: its ranks go on, and it connects anew."""

    type: ClassVar[str] = "searching"


@dataclass(frozen=True)
class JobOver:
    """The job cannot go on: a rank gave it up; ``code`` is what it exits with."""

    type: ClassVar[str] = "over"
    reason: str
    code: int = 1


@dataclass(frozen=True)
class Leaving:
    """The node takes part no longer: its agent was told to stop, or cannot start processes any more."""

    type: ClassVar[str] = "leaving"
    reason: str


@dataclass(frozen=True)
class Spawn:
    """Start a process for ``rank``.

    Attributes:
        incarnation: 0 for its first process, +1 at each respawn.
        generation: the one that it will join.
        incident: the incident that it belongs to ("" at the first start).
        env: what it gets besides what all ranks of the node get.
    """

    type: ClassVar[str] = "spawn"
    rank: int
    incarnation: int
    generation: int
    incident: str
    env: dict[str, str]


@dataclass(frozen=True)
class OpenStore:
    """Open a store for ``generation``, and close the one before."""

    type: ClassVar[str] = "open-store"
    generation: int


@dataclass(frozen=True)
class Discard:
    """The ranks of this node were taken for dead: end them, and join as a node that has none."""

    type: ClassVar[str] = "discard"


@dataclass(frozen=True)
class Begin:
    """All ranks are present: let those of the node enter their block.

    Attributes:
        incident: the incident that led here ("" at the first start).
        env: to be put into the ranks' environment.
        high_water: the highest optimizer step that any rank was ever seen to commit (-1: none).
        target: the step that was in the making: progress to it is to be told at once (-1: none).
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
    """Ask these ranks where their main threads stand."""

    type: ClassVar[str] = "ask"
    id: int
    ranks: list[list[int]]


@dataclass(frozen=True)
class Kill:
    """End the process of ``rank``, if no generation after ``generation`` has begun; that is no fault by itself.

    Attributes:
        beat: only if its main thread is still stuck at this one (-1: in any case).
    """

    type: ClassVar[str] = "kill"
    rank: int
    incarnation: int
    generation: int
    beat: int = -1


@dataclass(frozen=True)
class AllDone:
    """Every rank's block returned."""

    type: ClassVar[str] = "all-done"


@dataclass(frozen=True)
class End:
    """The job is over.

    Attributes:
        code: for the agent to exit with.
        last_words: to be said at the end.
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
