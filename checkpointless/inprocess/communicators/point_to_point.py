"""Count sends and receives by pair of ranks, since torch counts collectives only."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from checkpointless.patches import Patch, Patches


class PointToPointCounts:
    """Counts what this rank has sent to, and wants to receive from, each rank of each group.

    Attributes:
        counts: how often, by group and pair: ``4/0>1`` is from rank 0 of the group that torch calls ``4`` to its
            rank 1. The sender and the receiver count the same.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._patches = Patches()

    def install(self) -> None:
        """Count from now on (idempotent)."""
        if not self._patches.are_made:
            self._patches.make(
                [
                    Patch(dist.ProcessGroup, "send", self._counting(lambda own, peer: f"{own}>{peer}"), "to count"),
                    Patch(dist.ProcessGroup, "recv", self._counting(lambda own, peer: f"{peer}>{own}"), "to count"),
                ]
            )

    def uninstall(self) -> None:
        """Restore torch's methods."""
        self._patches.undo()

    def _counting(self, pair: Callable[[int, int], str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def patch(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def counting(group: Any, tensors: Any, peer: int, *args: Any, **kwargs: Any) -> Any:
                self.counts[f"{group.group_name}/{pair(group.rank(), peer)}"] += 1
                return original(group, tensors, peer, *args, **kwargs)

            return counting

        return patch
