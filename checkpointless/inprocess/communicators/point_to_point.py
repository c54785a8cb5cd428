"""Count sends and receives by pair of ranks, since torch counts collectives only."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

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
                    Patch(dist.ProcessGroup, "send", self.counting_sends, "torch does not count messages"),
                    Patch(dist.ProcessGroup, "recv", self.counting_receipts, "torch does not count messages"),
                ]
            )

    def uninstall(self) -> None:
        """Restore torch's methods."""
        self._patches.undo()

    def counting_sends(self, send: Callable[..., Any]) -> Callable[..., Any]:
        """Return a group's ``send``, counted."""

        @functools.wraps(send)
        def counting(group: Any, tensors: Any, peer: int, *args: Any, **kwargs: Any) -> Any:
            self._count(group, group.rank(), peer)
            return send(group, tensors, peer, *args, **kwargs)

        return counting

    def counting_receipts(self, recv: Callable[..., Any]) -> Callable[..., Any]:
        """Return a group's ``recv``, counted."""

        @functools.wraps(recv)
        def counting(group: Any, tensors: Any, peer: int, *args: Any, **kwargs: Any) -> Any:
            self._count(group, peer, group.rank())
            return recv(group, tensors, peer, *args, **kwargs)

        return counting

    def _count(self, group: Any, source: int, target: int) -> None:
        self.counts[f"{c10d._world.pg_names.get(group)}/{source}>{target}"] += 1
