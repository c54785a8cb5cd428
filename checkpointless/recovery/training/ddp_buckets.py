"""The buckets of torch's ``DistributedDataParallel``, which have to be the same in every generation.

DDP reduces gradients in buckets. It begins with one bucket and, after the first backward pass, makes others in the
order in which gradients became ready (``Reducer::rebuild_buckets``, torch/csrc/distributed/c10d/reducer.cpp). Where
an element lies in a bucket decides in which order an all-reduce adds up its parts, and with it the bits of the sum.
A job that made DDP anew after a fault would therefore leave the path of an undisturbed one. Here the order is given
before the first step, in every generation alike: from the last parameter to the first, which is about the order in
which gradients become ready.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from checkpointless.inprocess import UnrecoverableError


def settle_buckets(modules: Iterable[torch.nn.Module]) -> None:
    """Give each ``DistributedDataParallel`` among ``modules`` and their parts its lasting buckets. Collective.

    Gradients are cleared. A module whose buckets stay as they are (``find_unused_parameters=True``), or are made
    already, is left alone.

    Args:
        modules: modules of which no backward pass is under way.

    Raises:
        UnrecoverableError: a module's buckets follow from its first backward pass in another way.
    """
    for module in modules:
        for part in module.modules():
            if isinstance(part, DistributedDataParallel):
                _settle(part)


def _settle(ddp: DistributedDataParallel) -> None:
    if ddp.static_graph:
        raise UnrecoverableError(
            "DistributedDataParallel(static_graph=True) reduces gradients in another order in its first step than "
            "later, so that no recovery could be exact: leave static_graph out"
        )
    if ddp.find_unused_parameters:
        return
    reducer: Any = ddp.reducer
    if reducer._rebuild_buckets():  # a backward pass before the training, as is made in every generation
        return
    parameters = [parameter for parameter in ddp._module_parameters if parameter.requires_grad]
    sparse = {
        id(part.weight)
        for part in ddp.modules()
        if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse
    }
    reducer.prepare_for_forward()
    reducer.prepare_for_backward([])
    with torch.enable_grad():
        chain = torch.zeros((), device=parameters[0].device, requires_grad=True)
        for parameter in parameters:
            chain = _GivesNothing.apply(parameter, chain, id(parameter) in sparse)
    with _without_hooks(parameters):
        chain.backward()
    for parameter in parameters:
        parameter.grad = None  # it may be a part of the buckets, which are given up before there are new ones
    reducer._rebuild_buckets()


class _GivesNothing(torch.autograd.Function):
    """Gives a parameter a gradient of zeros before anything below it in the chain has its own."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, below: torch.Tensor, is_sparse: bool) -> torch.Tensor:
        ctx.save_for_backward(parameter)
        ctx.is_sparse = is_sparse
        return below.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (parameter,) = ctx.saved_tensors
        if not ctx.is_sparse:
            return torch.zeros_like(parameter), grads[0], None
        rows = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
        values = parameter.new_empty(0, *parameter.shape[1:])
        return torch.sparse_coo_tensor(rows, values, parameter.shape), grads[0], None


@contextmanager
def _without_hooks(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Keep users' hooks on ``parameters`` from seeing gradients that are none."""
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    kept = [(parameter, name, getattr(parameter, name)) for parameter in parameters for name in names]
    calls = [(hooks, dict(hooks)) for _, _, hooks in kept if hooks]
    for hooks, _ in calls:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, inner in calls:
            hooks.update(inner)
