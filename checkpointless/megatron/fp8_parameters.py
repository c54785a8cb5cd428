"""Parameters that Megatron keeps in FP8 (``fp8_param_gather``).

Such a parameter is a tensor of TransformerEngine's that has no storage of its own: it shows 16 bits, and keeps
bytes and scales beside each other. It is never held or sent. Like a 16-bit parameter it is derived from the main
parameters of all ranks, to the same bits: quantising depends on them, and with delayed scaling on the scales, which
are buffers (:mod:`checkpointless.megatron.scales`).

Megatron quantises inside the update, but agrees with the other ranks on the largest values meanwhile. Behind the
lock of an update a rank must not wait for another one. So quantising is separated from the update, and is done
before the gather.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core.fp8_utils import is_float8tensor, quantize_param_shard
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

_COLLECT = "_get_fp8_params_and_shard_fp32_from_fp8"  # what Megatron quantises; nothing, while it is replaced


def fp8_parameters(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """Return the parameters of ``modules`` that are kept in FP8."""
    return [parameter for module in modules for parameter in module.parameters() if is_float8tensor(parameter)]


@contextmanager
def left_as_they_are(optimizer: DistributedOptimizer) -> Iterator[None]:
    """Keep an optimizer from quantising, which needs all ranks, while it copies main parameters to the model."""
    setattr(optimizer, _COLLECT, lambda: ([], [], []))
    try:
        yield
    finally:
        delattr(optimizer, _COLLECT)


def quantize(optimizers: Sequence[object]) -> None:
    """Quantise the main parameters of all ranks into the parameters that are kept in FP8. This is a collective.

    It may be repeated: the same main parameters and scales give the same bytes.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, DistributedOptimizer) and not optimizer.is_stub_optimizer:
            found = optimizer._get_fp8_params_and_shard_fp32_from_fp8()
            if found[0]:
                quantize_param_shard(*found, optimizer.data_parallel_group)


def unsupported_optimizer(optimizer: object) -> str | None:
    """Return why parameters in FP8 cannot be recovered exactly with one Megatron optimizer.

    Args:
        optimizer: the optimizer, which is not chained.

    Returns:
        One line that says what to set; None if there is no obstacle.
    """
    if getattr(getattr(optimizer, "config", None), "use_precision_aware_optimizer", False):
        return (
            "checkpointless cannot derive parameters in FP8 from a precision-aware optimizer: "
            "set use_precision_aware_optimizer=False or fp8_param_gather=False"
        )
    if not isinstance(optimizer, DistributedOptimizer):
        return (
            "checkpointless recovers parameters in FP8 from the distributed optimizer only: "
            "set use_distributed_optimizer=True or fp8_param_gather=False"
        )
    return None
