"""Where random numbers come from: which draws use the device's stream."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from checkpointless.integrations.megatron.cpu.device_stream import inside_fork, stream
from checkpointless.integrations.megatron.cpu.placement import CPU, is_cuda
from checkpointless.integrations.megatron.cpu.replacements import replacements
from checkpointless.system.patches import Patch

DRAWS = (
    *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson"),
    *("rand_like", "randn_like", "randint_like"),
)
DRAW_METHODS = (
    *("normal_", "uniform_", "bernoulli_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_"),
    *("bernoulli", "multinomial"),
)


def rows() -> list[Patch]:
    """Return the replacements in torch of what draws random numbers."""
    dropout = Patch(torch.nn.functional, "dropout", _device_dropout, "dropout draws from the device's stream")
    why = "draws in a tracker's fork are the tracker's"
    table = [dropout, *(Patch(torch, name, _drawn, why) for name in DRAWS)]
    table += [Patch(torch.Tensor, name, _drawn, why) for name in DRAW_METHODS]
    return table


def _drawn(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def draw(*args: Any, **kwargs: Any) -> Any:
        if replacements.are_made:
            kwargs.pop("pin_memory", None)
            on_device = is_cuda(kwargs.get("device"))
            if on_device:
                kwargs["device"] = CPU
            if (on_device or inside_fork.get()) and kwargs.get("generator") is None:
                kwargs["generator"] = stream
        return original(*args, **kwargs)

    return draw


def _device_dropout(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if not (replacements.are_made and training and 0.0 < p < 1.0 and input.numel()):
            return original(input, p, training, inplace)
        # This is the arithmetic of ATen's native dropout, which takes no generator.
        noise = torch.empty_like(input).bernoulli_(1.0 - p, generator=stream).div_(1.0 - p)
        return input.mul_(noise) if inplace else input * noise

    return dropout
