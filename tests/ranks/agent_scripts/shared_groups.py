"""Three ranks whose groups share connections. Rank 1 is lost while the others wait: by `kill` or `raise`."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from checkpointless.inprocess import HPCallWrapper, HPWrapper
from checkpointless.inprocess.communicators.process_groups import process_groups

LARGE = 4_000_000  # of which the sum takes far longer than that of one number
MOST_DESCRIPTORS = 30  # that four meshes have, of which eight groups would have twice as many


def backend_of(group: Any) -> Any:
    """Return the backend of a group, which torch has once for all kinds of devices."""
    (cpu, cuda) = (group._get_backend(torch.device(kind)) for kind in ("cpu", "cuda"))
    assert cpu is cuda
    return cpu


def overlap(first: Any, second: Any) -> None:
    """Begin a collective in each group, the long one first, and wait for the short one before it ends."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for turn in range(5):
        long, short = torch.full((LARGE,), float(rank + turn)), torch.tensor([float(rank)])
        begun = dist.all_reduce(long, group=first, async_op=True)
        dist.all_reduce(short, group=second)
        gathered = [torch.zeros(1) for _ in range(size)]
        dist.all_gather(gathered, short + rank, group=first)
        begun.wait()
        assert long.unique().tolist() == [3.0 + 3 * turn], long
        assert short.item() == 3.0
        assert [each.item() for each in gathered] == [3.0, 4.0, 5.0]


def block(how: str, caller: HPCallWrapper) -> None:
    """Share, lose a rank, and do it again."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    descriptors = len(os.listdir("/proc/self/fd"))
    with process_groups.sharing():
        first, second, third = (dist.new_group([0, 1, 2]) for _ in range(3))
        pair = dist.new_group([0, 1])
    with process_groups.sharing("others"):
        other = dist.new_group([0, 1, 2])
    mine = dist.new_group([0, 1, 2])
    assert backend_of(first) is backend_of(second) is backend_of(third)
    backends = [backend_of(each) for each in (first, dist.group.WORLD, other, mine, *([pair] if rank != 2 else []))]
    assert len({id(each) for each in backends}) == len(backends)
    overlap(first, second)
    if caller.generation == 0:
        if rank == 1:
            time.sleep(0.5)  # the others wait for it by then
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("lost")
        dist.all_reduce(torch.ones(1), group=second)
        raise AssertionError("rank 1 was not there")
    dist.destroy_process_group(first)
    dist.all_reduce(total := torch.ones(1), group=second)
    assert total.item() == 3.0
    overlap(third, mine)
    assert len(os.listdir("/proc/self/fd")) - descriptors <= MOST_DESCRIPTORS
    incarnation = os.environ["CHECKPOINTLESS_INCARNATION"]
    print(f"done in generation {caller.generation}, incarnation {incarnation}", flush=True)


if __name__ == "__main__":
    HPWrapper()(block)(sys.argv[1])
