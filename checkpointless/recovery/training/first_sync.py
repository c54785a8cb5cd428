"""What ``DistributedDataParallel`` does when it wraps a module: it gives all ranks the first one's parameters.

A rank that keeps its model must take part in that, as other ranks may have built theirs. But nothing may be written
to its parameters, which may be the only copy of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import utils

from checkpointless.patches import Patch, Patches
from checkpointless.transfer.wire import wire_device

_Sync = Callable[[Any, list[torch.Tensor], int, int], None]
#: Stands in for torch's function, which is its first argument; the others are what torch passes.
Stand = Callable[[_Sync, Any, list[torch.Tensor], int, int], None]

_WHY = "a rank that keeps its model takes part in the first synchronisation of DDP without being written to"


class FirstSync:
    """Has another function stand in for the first synchronisation of every wrapper, until :meth:`end`."""

    def __init__(self) -> None:
        self._patches = Patches()

    def begin(self, stand: Stand) -> None:
        """Have ``stand`` called in the place of torch's function, with that function as its first argument."""
        self._patches.undo()
        self._patches.make([Patch(utils, "_sync_params_and_buffers", partial(partial, stand), _WHY)])

    def end(self) -> None:
        """Restore torch's function."""
        self._patches.undo()


def all_keep(group: dist.ProcessGroup, are_kept: bool) -> bool:
    """Return whether all ranks of a wrapper keep all that is synchronised: nothing is to be done. Collective.

    Args:
        group: the process group of the wrapper.
        are_kept: whether this rank does.
    """
    flag = torch.tensor([are_kept], dtype=torch.int32, device=wire_device(group))
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
    return bool(flag.item())


def sync_others(
    group: dist.ProcessGroup,
    states: Sequence[torch.Tensor],
    bucket_bytes: int,
    source: int,
    are_kept: Sequence[bool],
) -> None:
    """Take part in a synchronisation, and write only to tensors that are not kept. Collective.

    The broadcasts are those of torch's ``broadcast_coalesced`` (torch/csrc/distributed/c10d/reducer.cpp), which the
    other ranks call: tensors are assigned to buckets in the same way, and each bucket is sent as one flat tensor.

    Args:
        group: the process group of the wrapper.
        states: the parameters and buffers, in the wrapper's order.
        bucket_bytes: the most bytes of a bucket.
        source: the rank in the group whose values all get.
        are_kept: for each tensor, whether it stays as it is.
    """
    if not states:
        return
    for bucket in dist._compute_bucket_assignment_by_size(list(states), [bucket_bytes])[0]:
        tensors = [states[index] for index in bucket]
        if group.rank() == source or not all(are_kept[index] for index in bucket):
            flat = torch.cat([each.contiguous().view(-1) for each in tensors])
        else:
            flat = tensors[0].new_empty(sum(each.numel() for each in tensors))
        dist.broadcast(flat, group=group, group_src=source)
        place = 0
        for index in bucket:
            count = states[index].numel()
            if not are_kept[index]:
                states[index].copy_(flat[place : place + count].view_as(states[index]))
            place += count
