"""Where tensors and modules are: whatever asks for a CUDA device is placed on the CPU."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from checkpointless.integrations.megatron.cpu.replacements import itself, replacements
from checkpointless.system.patches import Patch

CPU = torch.device("cpu")

_FACTORIES = (
    *("tensor", "as_tensor", "scalar_tensor", "empty", "zeros", "ones", "full", "eye", "arange", "linspace"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "empty_strided"),
)
_NEW_TENSOR_METHODS = ("new_tensor", "new_empty", "new_zeros", "new_ones", "new_full")


def rows() -> list[Patch]:
    """Return the replacements in torch of what creates or moves a tensor or a module, or tells a tensor's type."""
    table = [
        Patch(torch.Tensor, "cuda", lambda _: itself, "a tensor is already where it should be"),
        Patch(torch.Tensor, "pin_memory", lambda _: itself, "pinning needs a CUDA driver"),
        Patch(torch.nn.Module, "cuda", lambda _: itself, "a module is already where it should be"),
        Patch(torch.Tensor, "to", moved, "moves to `cuda` stay where they are"),
        Patch(torch.Tensor, "type", _typed, "Megatron's optimizers compare with 'torch.cuda.FloatTensor'"),
    ]
    why = "`device='cuda'` means the CPU"
    table += [Patch(torch, name, _placed, why) for name in _FACTORIES]
    table += [Patch(torch.Tensor, name, _placed, why) for name in _NEW_TENSOR_METHODS]
    return table


def is_cuda(device: object) -> bool:
    """Return whether an argument, of whatever type, is a CUDA device."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":", 1)[0] == "cuda"


def _placed(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if replacements.are_made:
            kwargs.pop("pin_memory", None)
            if is_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
        return original(*args, **kwargs)

    return factory


def moved(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method like `original` in which a CUDA device means the CPU, wherever it stands in the arguments."""

    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if replacements.are_made:
            args = tuple(CPU if is_cuda(arg) else arg for arg in args)
            if is_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
        return original(self, *args, **kwargs)

    return to


def _typed(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not replacements.are_made:
            return original(self, dtype, *args, **kwargs)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        result = original(self, dtype, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.") if isinstance(result, str) else result

    return type_
