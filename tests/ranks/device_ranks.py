"""Provide what the ranks of ``test_device.py`` do on the test device."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import torch
import torch.distributed as dist


def _begin(run_dir: str) -> Any:
    os.environ["CHECKPOINTLESS_RUN_DIR"] = run_dir
    from tests.device import played

    played.install()
    dist.init_process_group(played.BACKEND)
    return played.device


def collectives(run_dir: str) -> dict[str, Any]:
    """Return the results of every collective and message, as gloo has them."""
    _begin(run_dir)
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.arange(2.0) + rank
    reduced, most = mine.clone(), mine.clone()
    dist.all_reduce(reduced)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    gathered = torch.empty(2 * size)
    dist.all_gather_into_tensor(gathered, mine)
    scattered = torch.empty(2)
    dist.reduce_scatter_tensor(scattered, gathered)
    given = torch.full((2,), float(rank))
    dist.broadcast(given, 1)
    exchanged = torch.empty(size)
    dist.all_to_all_single(exchanged, torch.arange(float(size)) + 10 * rank)
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, rank)
    received = torch.empty(1)
    ring = [
        dist.P2POp(dist.isend, mine[:1].clone(), (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    found = {
        "reduced": reduced.tolist(),
        "most": most.tolist(),
        "gathered": gathered.tolist(),
        "scattered": scattered.tolist(),
        "given": given.tolist(),
        "exchanged": exchanged.tolist(),
        "objects": objects,
        "received": received.tolist(),
    }
    torch.cuda.synchronize()
    return found


def properties(run_dir: str) -> dict[str, Any]:
    """Return what bites a recovery: rank 0 waits for rank 1, which comes late or never."""
    device = _begin(run_dir)
    pair, other = dist.new_group([0, 1]), dist.new_group([0, 1])
    groups: list[Any] = [pair, other]
    for group in groups:
        dist.barrier(group)  # the communicators are made
    found: dict[str, Any] = {}
    if dist.get_rank() == 0:
        began = time.monotonic()
        tensor = torch.ones(1)
        work = dist.all_reduce(tensor, group=pair, async_op=True)
        work.wait()
        found["launch_s"] = time.monotonic() - began
        found["sum"] = float(tensor.item())
        found["use_s"] = time.monotonic() - began
        found["is_completed"] = work.is_completed()
    else:
        time.sleep(3.0)
        dist.all_reduce(torch.ones(1), group=pair)
        torch.cuda.synchronize()
    dist.barrier()
    if dist.get_rank() == 0:
        lost = [torch.ones(1) for _ in groups]
        for group, tensor in zip(groups, lost, strict=True):
            dist.all_reduce(tensor, group=group)
        first = threading.Thread(target=pair.abort)
        first.start()
        first.join(0.5)
        found["one abort alone ends"] = not first.is_alive()
        other.abort()
        first.join(30)
        found["aborts of all end"] = not first.is_alive()
        dist.barrier(pair)
        found["an aborted sum"] = float(lost[0].item())
        device.fail("device-side assert triggered")
        for what in (torch.cuda.synchronize, lost[0].item, lambda: dist.all_reduce(lost[0])):
            try:
                what()
            except RuntimeError as error:
                found.setdefault("errors", []).append(str(error))
    return found
