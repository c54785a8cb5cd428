"""Put the state in its new place on every rank: a rank takes back what it holds, or its peers fill it.

Tensors with the same holders move together: all ranks go through the replica groups that they are in, in ascending
order, and fill or are filled. So no two ranks wait for each other.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from checkpointless.inprocess.communicators.helper_thread import run_in_helper_thread
from checkpointless.recovery.decide import Parts, peers_of
from checkpointless.state.port import MODEL, PARAMETER, TrainingState, split
from checkpointless.state.serialization.state_tree import Tree
from checkpointless.transfer.rank_groups import Group
from checkpointless.transfer.tensor_entry import Key, TensorEntry
from checkpointless.transfer.transfer import Fill, OnBucket, TransferReport, receive_state, send_state


class Refill:
    """Moves the state, and remembers in ``arrived`` what an interrupted transfer brought, until :meth:`forget`."""

    def __init__(self) -> None:
        self.arrived: Mapping[Key, torch.Tensor] = {}

    def forget(self) -> None:
        """Let go of what has arrived, since it is whole and kept elsewhere, or of no use."""
        self.arrived = {}

    def move(
        self,
        state: TrainingState,
        refills: Mapping[int, Parts],
        tensors: dict[Key, torch.Tensor] | None,
        objects: Tree,
        *,
        memory_budget_bytes: int,
        on_bucket: OnBucket | None = None,
    ) -> tuple[Tree, TransferReport]:
        """Put tensors in place in ``state``. Every rank calls it that fills or is filled.

        ``refills``: by rank to fill, alike everywhere; ``tensors``: what this rank holds, in the order of every
        holder, each replaced as its successor is filled. Return the non-tensor state, and what was moved. Raises
        ``RuntimeError`` if the decision does not fit, ``TransferError`` if a source was lost or a bucket damaged.
        """
        rank = dist.get_rank()
        if rank in refills:
            return self._fill(state, refills[rank], tensors or {}, memory_budget_bytes)
        if tensors is None:
            raise RuntimeError(f"rank {rank} was decided to be healthy but holds no state")
        self._serve(state, tensors, objects, refills, on_bucket)
        return objects, self._take_back(state, tensors)

    def _fill(
        self, state: TrainingState, parts: Parts, held: Mapping[Key, torch.Tensor], memory_budget_bytes: int
    ) -> tuple[Tree, TransferReport]:
        objects: dict[Group, Any] = {}
        reports = []
        for group, sources in sorted(parts):
            ordered = _peers_first(sources, parts)
            objects[group], report = self._receive(state, ordered, held, memory_budget_bytes)
            reports.append(report)
        whole = objects[min(objects)] if peers_of(parts) else _join_objects(state, objects)
        return whole, reports[0] if len(reports) == 1 else TransferReport.of(reports)

    def _receive(
        self,
        state: TrainingState,
        sources: Sequence[int],
        held: Mapping[Key, torch.Tensor],
        memory_budget_bytes: int,
    ) -> tuple[Tree, TransferReport]:
        """Receive a part from ``sources``; keep what an interrupted transfer brought or this rank still had."""
        known = {**held, **self.arrived}

        def room(entries: Sequence[TensorEntry]) -> Mapping[Key, torch.Tensor]:
            whole = state.allocate(entries)
            self.arrived = {**self.arrived, **{each.key: whole[each.key] for each in entries if each.key in whole}}
            return whole

        return run_in_helper_thread(
            lambda: receive_state(sources, room, known=known, memory_budget_bytes=memory_budget_bytes)
        )

    @staticmethod
    def _serve(
        state: TrainingState,
        tensors: Mapping[Key, torch.Tensor],
        objects: Tree,
        refills: Mapping[int, Parts],
        on_bucket: OnBucket | None,
    ) -> None:
        """Fill every rank of which this rank is a source.

        Non-tensor state goes with a rank's first part, from a holder of all of them; if there is none, with each.
        """
        rank = dist.get_rank()
        fills: dict[Group, list[Fill]] = defaultdict(list)
        asked: set[Group] = set()  # with which objects go
        for destination, parts in sorted(refills.items()):
            first = min(parts)[0]
            for group, sources in parts:
                if rank in sources:
                    ordered = _peers_first(sources, parts)
                    fills[group].append(Fill(destination, ordered.index(rank), len(ordered)))
                    asked |= {group} if group == first or not peers_of(parts) else set()
        mine = split(state, tensors) if fills else {}
        for group in mine:
            for destination in group:
                if destination in refills and group not in dict(refills[destination]):
                    raise RuntimeError(
                        f"rank {destination} is to be filled and has said nothing of {next(iter(mine[group]))}"
                    )
        for group in sorted(fills):
            present, told = mine.get(group, {}), objects if group in asked else {}
            run_in_helper_thread(partial(send_state, present, told, fills[group], on_bucket=on_bucket))

    @staticmethod
    def _take_back(state: TrainingState, tensors: dict[Key, torch.Tensor]) -> TransferReport:
        """Put this rank's tensors in their new place: without a copy where that is possible, else copied."""
        began_s = time.monotonic()
        room = state.allocate([TensorEntry.of(key, each) for key, each in tensors.items()], tensors)
        with torch.no_grad():
            for key in list(tensors):
                if room[key] is not tensors[key]:
                    room[key].copy_(tensors[key])
                    tensors[key] = room[key]  # one by one: little of the state exists twice
        kept = sum(tensor.nbytes for tensor in tensors.values())
        return TransferReport(kept=kept, seconds=time.monotonic() - began_s)


def _peers_first(sources: Sequence[int], parts: Parts) -> tuple[int, ...]:
    """Return the sources of a part in their places: first those that hold all parts, the first gives objects."""
    peers = {*peers_of(parts)}
    return tuple(sorted(sources, key=lambda source: (source not in peers, source)))


def _join_objects(state: TrainingState, objects: Mapping[Group, dict[str, Any]]) -> dict[str, Any]:
    """Make one snapshot's objects of those of a holder of each part, which are right for its tensors."""
    first = objects[min(objects)]
    joined: dict[Key, Any] = {}
    for group, theirs in objects.items():
        plain = theirs[MODEL]["state"]
        keys = {(*key, PARAMETER): key for key in plain}
        for key in state.replica_groups(keys).get(group, ()):
            joined[keys[key]] = plain[keys[key]]
    return {**first, MODEL: {**first[MODEL], "state": joined}}
