"""Tensors in plain form: the dtype by its name, and the memory as flat bytes."""

from __future__ import annotations

import torch

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of ``dtype`` without ``torch.``, as it travels."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype that :func:`dtype_name` named; raise ``ValueError`` if there is none."""
    if name not in _DTYPES:
        raise ValueError(f"unknown dtype {name!r}")
    return _DTYPES[name]


def is_on_host(tensor: torch.Tensor) -> bool:
    """Return whether the bytes of ``tensor`` are in the host's memory, so that reading them waits for nothing."""
    return tensor.device.type == "cpu"


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of ``tensor`` as flat uint8 on its device: a view if it is contiguous, else a copy."""
    return flat_bytes(tensor.detach().contiguous())


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous ``tensor`` as flat uint8; one of one element may have any stride."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of ``tensor``, the local shard of a DTensor, as a plain tensor of the same memory."""
    if hasattr(tensor, "to_local"):
        with torch.no_grad():
            part: torch.Tensor = tensor.to_local()
        return part
    return tensor.data if isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad else tensor


def own_device(kind: str) -> torch.device:
    """Return this process's device of a kind, ``cpu`` or ``cuda``; raise ``ValueError`` if it has none such."""
    if kind == "cpu":
        return torch.device("cpu")
    if kind != "cuda" or not torch.cuda.is_available():
        raise ValueError(f"there is no device {kind!r} on this rank")
    return torch.device("cuda", torch.cuda.current_device())
