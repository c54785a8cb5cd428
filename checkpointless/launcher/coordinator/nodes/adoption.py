"""How a new coordinator takes over a running job after the previous coordinator was lost."""

from __future__ import annotations

from checkpointless.launcher.coordinator.roster import Node, Rank, Roster
from checkpointless.launcher.protocol.board import NO_STEP
from checkpointless.launcher.protocol.causes import Cause, CauseKind, attribute, exit_cause
from checkpointless.launcher.protocol.node_messages import (
    IN_BLOCK,
    RankDone,
    RankEnded,
    RankReady,
    RankState,
    Standing,
    Trouble,
)


class Adoption:
    """Collects what the nodes report about the ranks that they run, until all nodes have come.

    Args:
        roster: the nodes and ranks of the job; it is updated with what the nodes report.
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
        """The newest generation that began on any node."""
        return max(standing.generation for standing in self._standings.values())

    @property
    def incidents(self) -> int:
        """The number of incidents that the job has had."""
        return max(standing.incident for standing in self._standings.values())

    @property
    def high_water(self) -> int:
        """The highest step that any rank is known to have committed."""
        told = max(standing.high_water for standing in self._standings.values())
        return max(told, *(rank.committed for rank in self._roster.ranks))

    @property
    def run_id(self) -> str:
        """The run id of the job."""
        return next(iter(self._standings.values())).run_id

    def put(self, node: Node, standing: Standing) -> None:
        """Record where the ranks of a node stand.

        Raises:
            ValueError: the node does not run one of these ranks.
        """
        self._standings[node.index] = standing
        for said in standing.ranks:
            rank = self._roster.rank_of(said.number, node)
            rank.incarnation, rank.committed, rank.making = said.incarnation, said.committed, said.making
            self._roster.move(rank, said.state)

    def drop(self, node: Node) -> None:
        """Forget the report of a node that is lost (again)."""
        self._standings.pop(node.index, None)

    def hear(self, rank: Rank, message: RankReady | Trouble | RankEnded | RankDone) -> None:
        """Record what happened to a rank before its own node came, or while other nodes are on their way."""
        if isinstance(message, Trouble):
            self._causes.append(message.cause)
        elif isinstance(message, RankEnded):
            self._ends.append(message)
            self._roster.move(rank, RankState.GONE)
        elif rank.state is not RankState.GONE:  # else no process of it was asked for yet
            self._roster.move(rank, RankState.READY if isinstance(message, RankReady) else RankState.DONE)

    @property
    def is_over(self) -> bool:
        """Whether every rank's block had returned, as one node knows, and nobody is missing in the next one."""
        newest = self.generation
        if not any(each.finished and each.generation == newest for each in self._standings.values()):
            return False
        return not {RankState.READY, RankState.GONE} <= {rank.state for rank in self._roster.ranks}

    def failure(self) -> str:
        """Return which rank failed, or which node was lost, after all blocks had returned ("": none)."""
        failed = [exit_cause(end.rank, end.code, NO_STEP) for end in self._ends if end.code != 0]
        absent = self._absent()
        if absent and not failed:
            return f"node {absent[0]} was lost before its ranks had ended (as was the coordinator)"
        return str(attribute(failed)) if failed else ""

    def cause(self) -> Cause | None:
        """Return why the job has to regroup, or None if all its ranks are in their block and undisturbed."""
        ranks = self._roster.ranks
        causes = [exit_cause(end.rank, end.code, end.making) for end in self._ends if not end.forgiven]
        if causes or self._causes:
            return attribute([*self._causes, *causes])
        of = {standing.generation for standing in self._standings.values()}
        if len(of) == 1 and all(rank.state in IN_BLOCK for rank in ranks):
            return None
        absent = self._absent()
        step = max(rank.making for rank in ranks)
        if absent:
            why = "as was the coordinator"
            return Cause(CauseKind.LOSS, None, "node", "was lost", step, why, who=f"node {absent[0]}")
        gone = next((rank for rank in ranks if rank.state is RankState.GONE), None)
        if gone is not None:
            return Cause(CauseKind.LOSS, gone.number, "exit", "ended while there was no coordinator", step)
        why = "in the middle of an incident"
        return Cause(CauseKind.LOSS, None, "coordinator", "was lost", step, why, who="the coordinator")

    def _absent(self) -> list[int]:
        return sorted({rank.node.index for rank in self._roster.ranks} - self._standings.keys())
