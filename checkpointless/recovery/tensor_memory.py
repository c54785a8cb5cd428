"""A tensor as a dtype by name and flat bytes."""

from __future__ import annotations

import torch

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of ``dtype`` without ``torch.``, as it travels."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype that :func:`dtype_name` named.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in _DTYPES:
        raise ValueError(f"unknown dtype {name!r}")
    return _DTYPES[name]


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of ``tensor`` as a flat uint8 tensor on its device: a view where it is contiguous, else a copy."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def own_device(kind: str) -> torch.device:
    """This process's device of a kind: a tensor of another rank's GPU belongs on this rank's.

    Args:
        kind: ``cpu`` or ``cuda``.

    Raises:
        ValueError: another kind, or there is no GPU here.
    """
    if kind == "cpu":
        return torch.device("cpu")
    if kind != "cuda" or not torch.cuda.is_available():
        raise ValueError(f"there is no device {kind!r} on this rank")
    return torch.device("cuda", torch.cuda.current_device())
