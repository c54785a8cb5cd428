"""A few elements of each of many tensors: enough to notice at little cost that others have taken their places."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

_ELEMENTS = 16  # at the beginning of a tensor, and as many from its middle on


def samples(tensors: Mapping[Any, torch.Tensor]) -> dict[Any, bytes]:
    """Return the bytes of a few elements of each of ``tensors``, by key; there is one copy to the host per device.

    Args:
        tensors: plain tensors of any shapes, dtypes and devices. One without storage on a device, or one that is
            quantized, is left out.
    """
    by_device: dict[torch.device, list[tuple[Any, torch.Tensor]]] = defaultdict(list)
    for key, tensor in tensors.items():
        if tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized) and tensor.numel():
            by_device[tensor.device].append((key, _sample(tensor.detach())))
    found: dict[Any, bytes] = {}
    for taken in by_device.values():
        together = torch.cat([sample for _, sample in taken]).cpu().numpy().tobytes()
        place = 0
        for key, sample in taken:
            found[key] = together[place : place + sample.numel()]
            place += sample.numel()
    return found


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return some elements of a tensor as bytes, wherever they lie in its shape."""
    begin = tensor.storage_offset()
    count = min(tensor.numel(), tensor.untyped_storage().nbytes() // tensor.itemsize - begin)  # it may be expanded
    starts = (0, count // 2) if count > 2 * _ELEMENTS else (0,)
    size = min(count, 2 * _ELEMENTS) // len(starts)
    return torch.cat([tensor.as_strided((size,), (1,), begin + start).view(torch.uint8) for start in starts])
