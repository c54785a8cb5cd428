"""Who takes part in a job, as the coordinator knows it: nodes, spares, ranks, and how many are in which state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from checkpointless.agent.board import NO_STEP
from checkpointless.agent.node_protocol import Command, Progress
from checkpointless.agent.workers import WorkerState

NOT_YET = "it has not joined yet"


@dataclass
class Node:
    """A node of the job.

    Attributes:
        index: its number, from 0.
        nproc: how many ranks it runs.
        send: gives its agent a command.
        joined: whether its agent can start processes.
        lost: why its agent cannot be reached any more ("" if it can).
        searching: whether it said that it lost sight of the coordinator, and has not come back yet.
        is_back: whether it has come back in the place of itself, and has not said yet what its ranks do.
    """

    index: int
    nproc: int
    send: Callable[[Command], None]
    joined: bool = False
    lost: str = ""
    searching: bool = False
    is_back: bool = False


@dataclass
class Rank:
    """A rank as the coordinator knows it.

    Attributes:
        state: as its node's agent sees it, or will when it has heard the last command. Only ``Roster.move``
            changes it.
        incarnation: of the process that was asked for last.
        committed: the last optimizer step that was read from its board.
        making: the step in the making that was read from it.
    """

    number: int
    node: Node
    state: WorkerState = WorkerState.GONE
    incarnation: int = -1
    committed: int = NO_STEP
    making: int = NO_STEP


class Roster:
    """The nodes and ranks of a job, counted so that no message makes anyone look at all of them.

    Args:
        nnodes: how many nodes there are.
        nproc: how many ranks on each.

    Attributes:
        nodes: by number.
        spares: nodes that wait to take a lost one's place.
        ranks: by number; those of a lost node are GONE.
        in_state: how many ranks are in each state.
        lost: the numbers of nodes that cannot be reached.
        not_joined: the numbers of nodes that cannot start processes, those that are lost among them.
    """

    def __init__(self, nnodes: int, nproc: int) -> None:
        self.nodes = [Node(index, nproc, _nowhere, lost=NOT_YET) for index in range(nnodes)]
        self.spares: list[Node] = []
        self.ranks = [Rank(node.index * nproc + local, node) for node in self.nodes for local in range(nproc)]
        self.in_state = Counter({WorkerState.GONE: len(self.ranks)})
        self.lost = set(range(nnodes))
        self.not_joined = set(range(nnodes))

    def put_in_place(self, node: Node, index: int) -> None:
        """Let ``node`` be the one of that number, with its ranks."""
        node.index = index
        self.nodes[index] = node
        self.lost.discard(index)
        for rank in self.ranks_of(node):
            rank.node = node

    def is_in_place(self, node: Node) -> bool:
        """Whether it is one of the job's nodes: no spare, and not replaced."""
        return node.index >= 0 and self.nodes[node.index] is node

    def ranks_of(self, node: Node) -> list[Rank]:
        """The ranks of a node that is in place."""
        return self.ranks[node.index * node.nproc : (node.index + 1) * node.nproc]

    def rank_of(self, number: int, node: Node) -> Rank:
        """The rank that ``node`` speaks of.

        Raises:
            ValueError: it does not run that one.
        """
        if not 0 <= number < len(self.ranks) or self.ranks[number].node is not node:
            raise ValueError(f"node {node.index} speaks of rank {number}, which it does not run")
        return self.ranks[number]

    def move(self, rank: Rank, state: WorkerState) -> None:
        """A rank is in another state; nothing else sets it, so the count is right."""
        self.in_state[rank.state] -= 1
        self.in_state[state] += 1
        rank.state = state

    def all_are(self, state: WorkerState) -> bool:
        """Whether every rank is in ``state``."""
        return self.in_state[state] == len(self.ranks)


class Standings:
    """What the nodes said last of where their ranks stand.

    The nodes of a job are a step or two apart, so of all they say there are only few different steps to look at.
    """

    def __init__(self) -> None:
        self._said: dict[int, Progress] = {}
        self._oldest: Counter[int] = Counter()
        self._newest: Counter[int] = Counter()
        self._timed = 0  # how many of them know how long a step takes
        self._longest_ms = 0

    def __len__(self) -> int:
        return len(self._said)

    @property
    def oldest(self) -> int:
        """The smallest committed step on any node."""
        return min(self._oldest)

    @property
    def newest(self) -> int:
        """The largest committed step on any node."""
        return max(self._newest)

    @property
    def longest_s(self) -> float:
        """The longest that any rank took from one beat to the next in a step; 0 until every node knows."""
        return self._longest_ms / 1000 if self._timed == len(self._said) else 0.0

    def put(self, node: int, progress: Progress) -> None:
        """A node says where its ranks stand now."""
        self.drop(node)
        self._said[node] = progress
        self._oldest[progress.oldest] += 1
        self._newest[progress.newest] += 1
        self._timed += progress.longest_ms > 0
        self._longest_ms = max(self._longest_ms, progress.longest_ms)

    def drop(self, node: int) -> None:
        """Forget what a node said, if it said anything."""
        before = self._said.pop(node, None)
        if before is not None:
            _take_one(self._oldest, before.oldest)
            _take_one(self._newest, before.newest)
            self._timed -= before.longest_ms > 0


def _take_one(counts: Counter[int], value: int) -> None:
    counts[value] -= 1
    if not counts[value]:
        del counts[value]


def _nowhere(command: Command) -> None:
    raise RuntimeError(f"{command.type!r} for a node that has not joined")
