"""The buckets of torch's ``DistributedDataParallel``, which have to be the same in every generation.

DDP reduces gradients in buckets. It begins with one bucket and, after the first backward pass, makes others in the
order in which gradients became ready (``Reducer::rebuild_buckets``, torch/csrc/distributed/c10d/reducer.cpp). Where
an element lies in a bucket decides in which order an all-reduce adds up its parts, and with it the bits of the sum.
A job that made DDP anew after a fault would therefore leave the path of an undisturbed one. Here the order is given
before the first step, in every generation alike: from the last parameter to the first, which is about the order in
which gradients become ready.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    parameters = [parameter for parameter in ddp._module_parameters if parameter.requires_grad]
    reducer.prepare_for_forward()
    reducer.prepare_for_backward([])
    with torch.enable_grad():
        chain = torch.zeros((), device=parameters[0].device, requires_grad=True)
        for parameter in parameters:
            chain = _GivesNothing.apply(parameter, chain)
    chain.backward()
    reducer._rebuild_buckets()
    for parameter in parameters:
        parameter.grad = None


class _GivesNothing(torch.autograd.Function):
    """Gives a parameter a gradient of zeros before anything below it in the chain has its own."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(parameter)
        return below.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (parameter,) = ctx.saved_tensors
        return torch.zeros_like(parameter), grads[0]
