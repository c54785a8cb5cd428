"""How far the ranks of a job have come, as their nodes report it."""

from __future__ import annotations

from collections import Counter

from checkpointless.wire.board import NO_STEP
from checkpointless.wire.node_messages import Progress


class ProgressReports:
    """The latest report of each node on how far its ranks have come.

    The nodes of a job are a step or two apart, so their reports name only a few different steps.

    Args:
        nnodes: how many nodes the job has.
    """

    def __init__(self, nnodes: int) -> None:
        self._nnodes = nnodes
        self._said: dict[int, Progress] = {}
        self._oldest: Counter[int] = Counter()
        self._newest: Counter[int] = Counter()
        self._timed = 0  # how many nodes know how long a step takes
        self._longest_ms = 0

    @property
    def are_complete(self) -> bool:
        """Whether every node has reported in this generation."""
        return len(self._said) == self._nnodes

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
        """The longest time that any rank took from one beat to the next in a step; 0 until every node knows."""
        return self._longest_ms / 1000 if self._timed == self._nnodes else 0.0

    def began_after(self, generation: int) -> int:
        """Return the newest step that a training of a generation began after.

        If none has said, it is the newest one committed. A report may have been under way when a generation began.
        """
        told = [said.began_after for said in self._said.values() if said.generation == generation]
        newest = max(told, default=NO_STEP)
        return self.newest if newest == NO_STEP else newest

    def put(self, node: int, progress: Progress) -> None:
        """Record a node's new report."""
        self.drop(node)
        self._said[node] = progress
        self._oldest[progress.oldest] += 1
        self._newest[progress.newest] += 1
        self._timed += progress.longest_ms > 0
        self._longest_ms = max(self._longest_ms, progress.longest_ms)

    def drop(self, node: int) -> None:
        """Forget a node's report, if there is one."""
        before = self._said.pop(node, None)
        if before is not None:
            _take_one(self._oldest, before.oldest)
            _take_one(self._newest, before.newest)
            self._timed -= before.longest_ms > 0

    def forget(self) -> None:
        """Forget all reports, because another generation begins."""
        for report in (self._said, self._oldest, self._newest):
            report.clear()
        self._timed = self._longest_ms = 0


def _take_one(counts: Counter[int], value: int) -> None:
    counts[value] -= 1
    if not counts[value]:
        del counts[value]
