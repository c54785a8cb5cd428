"""Put a part of the state in its new place on every rank: a rank takes back what it holds, or its peers fill it.

All of the state is moved this way, or, in fine-tuning, the frozen weights and the rest one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from checkpointless.inprocess import active_call_wrapper
from checkpointless.inprocess.context import aside
from checkpointless.serialization.state_tree import Tree
from checkpointless.transfer.bucket_rounds import OnBucket
from checkpointless.transfer.state_tensors import StateTensors
from checkpointless.transfer.tensor_entry import Key, TensorEntry
from checkpointless.transfer.transfer import Fill, TransferReport, receive_state, send_state


class Refill:
    """Moves one part of the state, and remembers what an interrupted transfer brought.

    Args:
        adopts: put the tensors that a rank to fill has already in their place first, without a copy where that is
            possible, because most of them are right.

    Attributes:
        arrived: the tensors that a transfer had room for, filled or not, until :meth:`forget` is called.
    """

    def __init__(self, adopts: bool = False) -> None:
        self.arrived: Mapping[Key, torch.Tensor] = {}
        self._adopts = adopts

    def forget(self) -> None:
        """Let go of what has arrived, since it is whole and kept elsewhere, or of no use."""
        self.arrived = {}

    def move(
        self,
        live: StateTensors,
        refills: Mapping[int, Sequence[int]],
        tensors: dict[Key, torch.Tensor] | None,
        objects: Tree,
        *,
        memory_budget_bytes: int,
        on_bucket: OnBucket | None = None,
    ) -> tuple[Tree, TransferReport]:
        """Put the part in its place in ``live``. Every rank calls it that fills or is filled.

        Args:
            live: the freshly built state.
            refills: maps each rank to fill to its sources, the same on every rank.
            tensors: the part as this rank holds it, in the order that it has on every holder; None: it holds none.
                In a rank that is filled it need not be right. In another one, each tensor is replaced by its
                successor as soon as that is filled.
            objects: the non-tensor state that goes with it.
            memory_budget_bytes: how many bytes the buffers of a transfer may take on each rank that takes part.
            on_bucket: see :func:`~checkpointless.transfer.transfer.send_state`.

        Returns:
            The non-tensor state, which is the sources' in a rank that was filled; and what was moved.

        Raises:
            RuntimeError: this rank is not to be filled and holds nothing.
            TransferError: something arrived damaged and could not be mended.
        """
        rank = dist.get_rank()
        if rank in refills:
            return self._fill(live, refills[rank], tensors or {}, memory_budget_bytes)
        if tensors is None:
            raise RuntimeError(f"rank {rank} was decided to be healthy but holds no state")
        self._serve(tensors, objects, refills, on_bucket)
        return objects, self._take_back(live, tensors)

    def _fill(
        self, live: StateTensors, sources: Sequence[int], held: Mapping[Key, torch.Tensor], memory_budget_bytes: int
    ) -> tuple[Tree, TransferReport]:
        """Receive the part from ``sources``; keep what an interrupted transfer brought or this rank still had."""
        known = {**held, **self.arrived}

        def room(entries: Sequence[TensorEntry]) -> Mapping[Key, torch.Tensor]:
            keys = [entry.key for entry in entries]
            if self._adopts:
                live.adopt({key: known[key] for key in keys if key in known})
            whole = live.room(entries)
            self.arrived = {key: whole[key] for key in keys if key in whole}
            return whole

        return aside(lambda: receive_state(sources, room, known=known, memory_budget_bytes=memory_budget_bytes))

    @staticmethod
    def _serve(
        tensors: Mapping[Key, torch.Tensor],
        objects: Tree,
        refills: Mapping[int, Sequence[int]],
        on_bucket: OnBucket | None,
    ) -> None:
        """Fill every rank that has this rank as a source."""
        rank = dist.get_rank()
        fills = [
            Fill(destination, sources.index(rank), len(sources))
            for destination, sources in sorted(refills.items())
            if rank in sources
        ]
        if fills:
            aside(lambda: send_state(tensors, objects, fills, on_bucket=on_bucket))

    @staticmethod
    def _take_back(live: StateTensors, tensors: dict[Key, torch.Tensor]) -> TransferReport:
        """Put this rank's tensors in their new place: without a copy where that is possible, else copied."""
        began_s = time.monotonic()
        adopted = live.adopt(tensors)
        copied = [key for key in tensors if key not in adopted]
        room = live.room([TensorEntry.of(key, tensors[key]) for key in copied])
        with torch.no_grad():
            for key in copied:
                room[key].copy_(tensors[key])
                tensors[key] = room[key]
        kept = sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())
        return TransferReport(kept=kept, seconds=time.monotonic() - began_s)


def announce_transfer(target: int) -> OnBucket:
    """Return what announces the phase ``transfer`` to fault specs when half of the buckets are sent.

    Args:
        target: the optimizer step whose state is moved.
    """

    def on_bucket(position: int, count: int, copy: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        call = active_call_wrapper()
        if call is None or position != count // 2:
            return None
        copies: list[torch.Tensor] = []

        def damaged() -> torch.Tensor:
            copies.append(copy())
            return copies[0]

        call.enter_phase("transfer", target, damaged)
        return copies[0] if copies else None

    return on_bucket
