"""The ranks of test_tiers.py that exchange parts without training."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from checkpointless.replication import exchange as exchanges
from checkpointless.replication.exchange import CliqueExchange, clique_group
from checkpointless.replication.host_memory import HostMemoryPool
from checkpointless.replication.parts import Content, Part, PartId, SaveId


def part_of(rank: int, pool: HostMemoryPool) -> Part:
    """Return a part that tells whose it is, of several chunks; rank 1's does not lie in one piece of memory."""
    tensors = torch.full((1000 + rank,), float(rank)), torch.tensor(rank)
    content = Content(f"rank {rank}".encode(), tensors)
    if rank != 1:
        content = pool.copy(content)
    return Part.sealed(PartId(SaveId(1, "0" * 24), rank), dist.get_world_size(), content)


def exchange(cases: list[dict[str, Any]]) -> list[list[Any]]:
    """Exchange parts in one clique of all ranks, case by case; return what this rank has after each, by sender."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    exchanges._CHUNK_BYTES = 1024
    pool, members = HostMemoryPool(), CliqueExchange(clique_group(1, dist.get_world_size()))
    found = []
    for case in cases:
        arrived = _exchanged(members, pool, **case)
        found.append(
            [
                [sender, part.content.structure.decode(), *(float(each.sum()) for each in part.content.tensors)]
                for sender, part in sorted(arrived.items())
            ]
        )
    dist.destroy_process_group()
    return found


def _exchanged(
    members: CliqueExchange,
    pool: HostMemoryPool,
    nothing: Collection[int] = (),
    no_room: Collection[int] = (),  # for others' parts
    damaged: Collection[int] = (),  # one of their messages
    is_staged: bool = False,  # messages go through a device, as over NCCL
) -> dict[int, Part]:
    rank, arrivals, send, left = dist.get_rank(), HostMemoryPool(), dist.isend, [1]
    members._device = torch.device("cpu", 0) if is_staged else torch.device("cpu")

    def sent(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if left and tensor.numel() > 64:  # a header, or a chunk of the tensors
            left.pop()
            tensor = tensor.clone()
            tensor[7] ^= 1
        return send(tensor, *args, **kwargs)

    def refused(header: bytes) -> Part:
        raise MemoryError("no memory")

    if rank in no_room:
        arrivals.room_for = refused  # type: ignore[method-assign, assignment]
    dist.isend = sent if rank in damaged else send
    arrived = dict(members.exchange(None if rank in nothing else part_of(rank, pool), arrivals))
    dist.isend = send
    return arrived
