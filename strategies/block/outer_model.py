"""A LightningModule that was made outside of the block, and so is the same one at each entry.

After a fault it has the trained weights already. The wrapper of the training that is over may still be referred to,
as an update may be still to be made: its hooks, which would fire beside those of the new one, are removed. And
``DistributedDataParallel`` gives all ranks the first one's weights, which may be those of a new process: what this
rank holds for the recovery is not written to.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from checkpointless.recovery.manager import CheckpointManager
from checkpointless.recovery.running import held_places
from checkpointless.recovery.training.first_sync import FirstSync, sync_others

_wrapped: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[DistributedDataParallel]] = (
    weakref.WeakKeyDictionary()
)


@contextmanager
def wrapping(model: torch.nn.Module, manager: CheckpointManager | None) -> Iterator[None]:
    """Wrap a model in the context, after a fault so that what this rank holds stays as it is.

    Args:
        model: the model that is wrapped.
        manager: the manager of the running block.
    """
    old = _wrapped.get(model)
    over = old() if old is not None else None
    if over is not None:
        over._remove_autograd_hooks()
    del over
    held = held_places(manager)
    if not held:
        yield
        return
    sync = FirstSync()

    def stand(original: Any, group: Any, states: Sequence[torch.Tensor], size: int, source: int) -> None:
        are_held = [each.data_ptr() in held for each in states]
        if any(are_held):
            sync_others(group, states, size, source, are_held)
        else:
            original(group, states, size, source)

    sync.begin(stand)
    try:
        yield
    finally:
        sync.end()


def note(model: torch.nn.Module, wrapper: DistributedDataParallel) -> None:
    """Note the wrapper of a model."""
    _wrapped[model] = weakref.ref(wrapper)
