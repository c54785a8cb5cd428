"""Evidence of the weights at a step boundary: cheap to take, compared only when a fault has come.

Code beside the update may put other weights into the places of the trained ones, such as an average for a
validation. A fault meanwhile would find them there. Version counters of torch say much of it for nothing, but not
what is written through ``parameter.data``: a few elements of a few tensors do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch

from checkpointless.state.serialization.tensor_memory import flat_bytes, local_part

#: Bytes of a few elements, one tensor per device; they stay where they are until they are compared.
Evidence: TypeAlias = tuple[torch.Tensor, ...]

_TENSORS = 8
_BYTES = 64


class Witness:
    """Takes evidence of weights.

    Args:
        weights: the tensors that nothing but an update may change, of any shape, dtype and device.
    """

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        fit = [
            each for each in weights if each.layout is torch.strided and not each.is_meta and not each.is_quantized
        ]
        step = max(1, len(fit) // _TENSORS)
        self._weights: Sequence[torch.Tensor] = fit[::step][:_TENSORS]

    def take(self) -> Evidence:
        """Return evidence of the weights as they are now, without waiting for a device."""
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        with torch.no_grad():
            for each in self._weights:
                part = local_part(each)
                if part.numel() and part.is_contiguous():
                    middle = flat_bytes(part)
                    start = len(middle) // 2 // 16 * 16
                    by_device.setdefault(part.device, []).append(middle[start : start + _BYTES])
            return tuple(torch.cat(parts) for parts in by_device.values())


def is_same(one: Evidence, other: Evidence) -> bool:
    """Return whether two pieces of evidence are of the same weights, as far as they show."""
    return len(one) == len(other) and all(map(torch.equal, one, other))
