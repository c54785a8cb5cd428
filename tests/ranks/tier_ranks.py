"""The ranks of test_tiers.py that exchange parts without training."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from checkpointless.replication import exchange as exchanges
from checkpointless.replication.exchange import CliqueExchange, clique_group
from checkpointless.replication.host_memory import HostMemoryPool, copy_into
from checkpointless.replication.parts import Content, Part, PartId, SaveId


def part_of(rank: int, pool: HostMemoryPool) -> Part:
    """Return a part that tells whose it is, of several chunks; rank 1's does not lie in one piece of memory."""
    tensors = torch.full((1000 + rank,), float(rank)), torch.tensor(rank)
    content = pool.content(f"rank {rank}".encode(), tensors)
    copy_into(content, tensors)
    if rank == 1:
        content = Content(content.structure, tensors)
    return Part.sealed(PartId(SaveId(1, "0" * 24), rank), dist.get_world_size(), content)


def exchange(
    nothing: list[int], no_room: list[int], flips: dict[str, int], times: int = 1, is_staged: bool = False
) -> dict[str, Any]:
    """Exchange parts in one clique of all ranks.

    Args:
        nothing: the ranks that have no part.
        no_room: the ranks that cannot take memory for the others'.
        flips: how many of the messages that a rank sends are damaged, by rank.
        times: how many exchanges there are.
        is_staged: whether messages go through the memory of a device, as over NCCL.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    exchanges._CHUNK_BYTES = 1024
    pool, arrivals = HostMemoryPool(), HostMemoryPool()
    members = CliqueExchange(clique_group(1, dist.get_world_size()))
    if is_staged:
        members._device = torch.device("cpu", 0)
    damaged = flips.get(str(rank), 0)
    send = dist.isend

    def sent(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal damaged
        if damaged and tensor.numel() > 64:  # a header, or a chunk of the tensors
            damaged -= 1
            tensor = tensor.clone()
            tensor[7] ^= 1
        return send(tensor, *args, **kwargs)

    if damaged:
        dist.isend = sent
    if rank in no_room:

        def refused(header: bytes) -> Part:
            raise MemoryError("no memory")

        arrivals.room_for = refused  # type: ignore[method-assign, assignment]

    found: list[dict[int, Any]] = []
    for _ in range(times):
        mine = None if rank in nothing else part_of(rank, pool)
        arrived = dict(members.exchange(mine, arrivals))
        found.append(
            {
                sender: [part.content.structure.decode(), *(float(each.sum()) for each in part.content.tensors)]
                for sender, part in arrived.items()
            }
        )
    dist.isend = send
    dist.destroy_process_group()
    return {"found": [sorted(each.items()) for each in found]}
