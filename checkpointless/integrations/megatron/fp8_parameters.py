"""Parameters that Megatron keeps in FP8 (``fp8_param_gather``).

Such a parameter is a tensor of TransformerEngine's that has no storage of its own: it shows 16 bits, and keeps
bytes and scales side by side. It is never held or sent. Like a 16-bit parameter it is derived from the main
parameters of all ranks, to the same bits: quantising depends on them, and with delayed scaling on the scales, which
are buffers (:mod:`checkpointless.integrations.megatron.state`).

Megatron quantises inside the update, but agrees with the other ranks on the largest values meanwhile. After the
lock of an update a rank must not wait for another one. So quantising is separated from the update, and is done
before the gather.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from checkpointless.integrations.compat.precision import DELAYED

# What Megatron-core 0.15 and 0.16 ask for the parameters to quantise; while it is replaced, there are none.
_COLLECT = "_get_fp8_params_and_shard_fp32_from_fp8"


def fp8_parameters(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """Return the parameters of ``modules`` that are kept in FP8."""
    return [parameter for module in modules for parameter in module.parameters() if is_float8tensor(parameter)]


def is_quantized(optimizer: object) -> bool:
    """Return whether a Megatron optimizer updates parameters that are kept in FP8."""
    return (
        isinstance(optimizer, DistributedOptimizer)
        and not optimizer.is_stub_optimizer
        and any(buffer.param_dtype is torch.uint8 for buffer in optimizer.buffers)
    )


@contextmanager
def left_as_they_are(optimizer: DistributedOptimizer) -> Iterator[None]:
    """Keep an optimizer from quantising, which needs all ranks, while it copies main parameters to the model."""
    if not is_quantized(optimizer):
        yield
        return
    setattr(optimizer, _COLLECT, lambda: ([], [], []))
    try:
        yield
    finally:
        delattr(optimizer, _COLLECT)


def quantize(optimizers: Sequence[object]) -> None:
    """Quantise the main parameters of all ranks into the parameters that are kept in FP8. This is a collective.

    It may be repeated: the same main parameters and scales give the same bytes. Parameters in 16 bits are copied
    once more, too, because Megatron does both at once.
    """
    for optimizer in optimizers:
        if is_quantized(optimizer):
            assert isinstance(optimizer, DistributedOptimizer)
            optimizer._copy_main_params_to_model_params()


def unsupported_optimizer(optimizer: object, recipe: str) -> str | None:
    """Return why parameters in FP8 cannot be recovered exactly with one Megatron optimizer.

    Args:
        optimizer: the optimizer, which is not chained.
        recipe: the name of the recipe of FP8 training.

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
    if not hasattr(DistributedOptimizer, _COLLECT):
        return (
            "checkpointless does not know how this Megatron-core quantises parameters in FP8: "
            "set fp8_param_gather=False"
        )
    if recipe == DELAYED and getattr(optimizer, "grad_scaler", None) is not None:
        return (
            "checkpointless cannot take along parameters in FP8 whose scale changes in a step that is skipped: "
            "set loss_scale=None, fp8_recipe='tensorwise' or fp8_param_gather=False"
        )
    if any(is_float8tensor(each) for group in optimizer.param_groups for each in group["params"]):
        return (
            "checkpointless cannot derive parameters in FP8 that have no main parameters: set params_dtype to "
            "torch.bfloat16 or fp8_param_gather=False"
        )
    return None
