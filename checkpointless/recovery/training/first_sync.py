"""What gives a model its first weights: ``DistributedDataParallel``, a broadcast, ``load_state_dict``.

A rank that keeps its model must take part in what is sent, as other ranks may have built theirs. But nothing may be
written to its parameters, which may be the only copy of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import utils
from torch.nn.modules.module import _IncompatibleKeys

from checkpointless.patches import Patch, Patches
from checkpointless.transfer.wire import wire_device

_Sync = Callable[[Any, list[torch.Tensor], int, int], None]
#: Stands in for torch's function, which is its first argument; the others are what torch passes.
Stand = Callable[[_Sync, Any, list[torch.Tensor], int, int], None]

_WHY = "a rank that keeps its model takes part in the first synchronisation of DDP without being written to"


class FirstSync:
    """Has other functions stand in for those that give models their first weights, until :meth:`end`."""

    def __init__(self) -> None:
        self._patches = Patches()

    def begin(self, stand: Stand) -> None:
        """Have ``stand`` called in the place of torch's function, with that function as its first argument."""
        self._patches.undo()
        self._patches.make([Patch(utils, "_sync_params_and_buffers", partial(partial, stand), _WHY)])

    def guard(self, kept: Kept) -> None:
        """Have a broadcast and ``load_state_dict`` leave what is kept as it is, too, until :meth:`end`.

        Args:
            kept: tells what is kept.
        """
        load, broadcast = partial(_loading, kept), partial(_broadcasting, kept)
        self._patches.make(
            [
                Patch(torch.nn.Module, "load_state_dict", load, _WHY),
                Patch(torch.optim.Optimizer, "load_state_dict", load, _WHY),
                Patch(dist, "broadcast", broadcast, _WHY),
                Patch(dist.distributed_c10d, "broadcast", broadcast, _WHY),
            ]
        )

    def end(self) -> None:
        """Restore torch's functions."""
        self._patches.undo()


class Kept(Protocol):
    """Tells what a rank has kept over the last fault."""

    def is_whole(self, owner: torch.nn.Module | torch.optim.Optimizer) -> bool:
        """Return whether all that belongs to ``owner`` is kept."""

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` lies where a tensor does that is kept."""


def _loading(kept: Kept, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what loads a state dict, but for what is kept: what is loaded after a fault does not count."""

    @wraps(original)
    def load(owner: Any, *args: Any, **options: Any) -> Any:
        if not kept.is_whole(owner):
            return original(owner, *args, **options)
        return _IncompatibleKeys([], []) if isinstance(owner, torch.nn.Module) else None

    return load


def _broadcasting(kept: Kept, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what broadcasts; a tensor that is kept is sent, and what is received for it is dropped."""

    @wraps(original)
    def broadcast(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        return original(tensor.clone() if kept.has(tensor) else tensor, *args, **options)

    return broadcast


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
