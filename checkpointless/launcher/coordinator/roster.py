"""The members of a job as the coordinator knows them: nodes, spares, ranks, and how many are in which state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from checkpointless.launcher.protocol.board import NO_STEP
from checkpointless.launcher.protocol.node_messages import Command, RankState

NOT_YET = "it has not joined yet"


@dataclass
class Node:
    """A node of the job.

    Attributes:
        joined: whether the node's agent can start processes.
        lost: why the node's agent can no longer be reached ("" if it can).
        searching: whether the node said that it lost the coordinator, and has not come back yet.
        is_back: whether the node has come back to its own place, and has not said yet what its ranks do.
        back_by_s: until when it had to come back, on the coordinator's clock; if it is gone again before it has
            said what its ranks do, it has no longer than that.
        speaks_by_s: until when a node that is back has to say so, on the coordinator's clock.
        tried: the ranks of which a process was started although their device is bad, with its incarnation and the
            highest committed step of that time.
    """

    index: int
    nproc: int
    send: Callable[[Command], None]
    joined: bool = False
    lost: str = ""
    searching: bool = False
    is_back: bool = False
    back_by_s: float = 0.0
    speaks_by_s: float = 0.0
    tried: dict[int, tuple[int, int]] = field(default_factory=dict)


@dataclass
class Rank:
    """A rank as the coordinator knows it.

    Attributes:
        state: the rank's state as its node's agent sees it, or will see it after the last command. Only
            ``Roster.move`` changes it.
        shard: the first of the ranks that hold the same state as this one (None: not known).
        first: incarnation of the rank's first process since the job began, or began again.
        entered: whether the process that is at the barrier was in its block before.
        unfit: why that process cannot enter its block again ("": it can).
    """

    number: int
    node: Node
    state: RankState = RankState.GONE
    incarnation: int = -1
    committed: int = NO_STEP
    making: int = NO_STEP
    shard: int | None = None
    first: int = 0
    entered: bool = False
    unfit: str = ""


class Roster:
    """The nodes and ranks of a job, counted so that no message requires a look at all of them.

    Attributes:
        ranks: the job's ranks, by number; the ranks of a lost node are GONE.
        in_state: how many ranks are in each state.
        lost: numbers of the nodes that cannot be reached.
        fresh: numbers of the ranks whose processes were started since all ranks had committed a step: they may hold
            no state yet.
        not_joined: numbers of the nodes that cannot start processes, including the lost ones.
        back_by_s: by when the nodes that look for this coordinator have to be back, by number, on the coordinator's
            clock.
    """

    def __init__(self, nnodes: int, nproc: int) -> None:
        self.nodes = [Node(index, nproc, _nowhere, lost=NOT_YET) for index in range(nnodes)]
        self.spares: list[Node] = []
        self.ranks = [Rank(node.index * nproc + local, node) for node in self.nodes for local in range(nproc)]
        self.in_state = Counter({RankState.GONE: len(self.ranks)})
        self.lost = set(range(nnodes))
        self.not_joined = set(range(nnodes))
        self.fresh: set[int] = set()
        self.back_by_s: dict[int, float] = {}

    def fell_back(self, step: int) -> None:
        """Note that the job resumes after ``step``, earlier than what was committed."""
        for node in self.nodes:
            node.tried = {rank: (number, min(after, step)) for rank, (number, after) in node.tried.items()}

    def put_in_place(self, node: Node, index: int) -> None:
        """Give ``node`` the number ``index`` and the ranks that belong to it."""
        node.index = index
        self.nodes[index] = node
        self.lost.discard(index)
        for rank in self.ranks_of(node):
            rank.node = node

    def is_in_place(self, node: Node) -> bool:
        """Return whether ``node`` is one of the job's nodes: neither a spare nor replaced."""
        return node.index >= 0 and self.nodes[node.index] is node

    def ranks_of(self, node: Node) -> list[Rank]:
        """Return the ranks of a node that is in place."""
        return self.ranks[node.index * node.nproc : (node.index + 1) * node.nproc]

    def rank_of(self, number: int, node: Node) -> Rank:
        """Return the rank with this number, which ``node`` speaks of.

        Raises:
            ValueError: the node does not run that rank.
        """
        if not 0 <= number < len(self.ranks) or self.ranks[number].node is not node:
            raise ValueError(f"node {node.index} named rank {number}, which it does not run")
        return self.ranks[number]

    def move(self, rank: Rank, state: RankState) -> None:
        """Move a rank to another state; nothing else sets the state, so the count is right."""
        self.in_state[rank.state] -= 1
        self.in_state[state] += 1
        rank.state = state

    def all_are(self, state: RankState) -> bool:
        """Return whether every rank is in ``state``."""
        return self.in_state[state] == len(self.ranks)


def _nowhere(command: Command) -> None:
    raise RuntimeError(f"{command.type!r} for a node that has not joined")
