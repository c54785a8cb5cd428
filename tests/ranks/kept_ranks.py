"""What ranks do in the tests of what is kept."""

from __future__ import annotations

import torch
import torch.distributed as dist

from checkpointless.recovery.training.first_sync import sync_others

_SIZES = (1000, 10, 700, 0, 3, 2000, 64, 500)
_BUCKET_BYTES = 4096


def sync(source: int) -> list[bool]:
    """Synchronise with ranks that do so as torch does; return for each tensor whether it is as it was.

    Args:
        source: the rank whose values all get. The second rank keeps its tensors but for the third and the last one.
    """
    dist.init_process_group("gloo")
    rank, group = dist.get_rank(), dist.distributed_c10d._get_default_group()
    dtypes = (torch.float32, torch.bfloat16)
    states = [torch.full((size,), float(rank + 1), dtype=dtypes[at % 2]) for at, size in enumerate(_SIZES)]
    if rank == 1:
        are_kept = [at not in (2, len(_SIZES) - 1) for at in range(len(_SIZES))]
        sync_others(group, states, _BUCKET_BYTES, source, are_kept)
    else:
        dist._broadcast_coalesced(group, states, _BUCKET_BYTES, source)
    dist.barrier()
    expected = float(source + 1)
    assert all(each.numel() == 0 or each.unique().numel() == 1 for each in states)
    return [
        bool((each == rank + 1).all()) and (rank == source or bool((each != expected).all())) for each in states
    ]
