"""How a coordinator that has just begun takes over a job that runs already, because the one before was lost."""

from __future__ import annotations

from checkpointless.agent.board import NO_STEP
from checkpointless.agent.incidents import Cause, CauseKind, attribute, exit_cause
from checkpointless.agent.node_protocol import STATES, RankDone, RankEnded, RankReady, Standing, Trouble
from checkpointless.agent.roster import Node, Rank, Roster
from checkpointless.agent.workers import IN_BLOCK, WorkerState


class Adoption:
    """What the nodes say of the ranks that they run, until all are here.

    Args:
        roster: takes in where each rank stands.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._standings: dict[int, Standing] = {}
        self._causes: list[Cause] = []
        self._ends: list[RankEnded] = []

    def __bool__(self) -> bool:
        return bool(self._standings)

    @property
    def generation(self) -> int:
        """The newest that began on any node."""
        return max(standing.generation for standing in self._standings.values())

    @property
    def incidents(self) -> int:
        """How many the job has had."""
        return max(standing.incident for standing in self._standings.values())

    @property
    def high_water(self) -> int:
        """The highest step that any rank is known to have committed."""
        told = max(standing.high_water for standing in self._standings.values())
        return max(told, *(rank.committed for rank in self._roster.ranks))

    @property
    def run_id(self) -> str:
        """Of the job."""
        return next(iter(self._standings.values())).run_id

    def put(self, node: Node, standing: Standing) -> None:
        """A node says where its ranks stand.

        Raises:
            ValueError: they are not its ranks, or a state is none.
        """
        self._standings[node.index] = standing
        for number, incarnation, state, committed, making in standing.ranks:
            if not 0 <= state < len(STATES):
                raise ValueError(f"a rank has no state {state}")
            rank = self._roster.rank_of(number, node)
            rank.incarnation, rank.committed, rank.making = incarnation, committed, making
            self._roster.move(rank, STATES[state])

    def drop(self, node: Node) -> None:
        """A node is lost (again)."""
        self._standings.pop(node.index, None)

    def hear(self, rank: Rank, message: RankReady | Trouble | RankEnded | RankDone) -> None:
        """Something happens to a rank while other nodes are on their way, or did before its own node came."""
        if isinstance(message, Trouble):
            self._causes.append(message.cause)
        elif isinstance(message, RankEnded):
            self._ends.append(message)
            self._roster.move(rank, WorkerState.GONE)
        else:
            self._roster.move(rank, WorkerState.READY if isinstance(message, RankReady) else WorkerState.DONE)

    @property
    def is_over(self) -> bool:
        """Whether every rank's block had returned, and some know it."""
        return any(standing.finished for standing in self._standings.values())

    def failure(self) -> Cause | None:
        """A rank that failed after its block had returned."""
        failed = [exit_cause(end.rank, end.code, NO_STEP) for end in self._ends if end.code != 0]
        return attribute(failed) if failed else None

    def cause(self) -> Cause | None:
        """Why the job needs to regroup; None if all its ranks are in their block, and undisturbed."""
        ranks = self._roster.ranks
        causes = [exit_cause(end.rank, end.code, end.making) for end in self._ends if not end.forgiven]
        if causes or self._causes:
            return attribute([*self._causes, *causes])
        of = {standing.generation for standing in self._standings.values()}
        if len(of) == 1 and all(rank.state in IN_BLOCK for rank in ranks):
            return None
        absent = sorted({rank.node.index for rank in ranks} - self._standings.keys())
        step = max(rank.making for rank in ranks)
        if absent:
            why = "as was the coordinator"
            return Cause(CauseKind.LOSS, None, "node", "was lost", step, why, who=f"node {absent[0]}")
        gone = next((rank for rank in ranks if rank.state is WorkerState.GONE), None)
        if gone is not None:
            return Cause(CauseKind.LOSS, gone.number, "exit", "ended while there was no coordinator", step)
        why = "in the middle of an incident"
        return Cause(CauseKind.LOSS, None, "coordinator", "was lost", step, why, who="the coordinator")
