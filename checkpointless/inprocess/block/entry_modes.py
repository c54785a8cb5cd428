"""Torch's modes at the entry of the block, which are the same at every entry.

A script may change one for a while, as loaders of pretrained weights do with the default dtype. A fault that comes
meanwhile would leave it changed in the processes that live on, and in no other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class EntryModes:
    """Modes of this process at one moment.

    Attributes:
        dtype: the default dtype.
        grad: whether gradients are computed.
        autocast: by device, whether operations are cast, and to which dtype.
    """

    dtype: torch.dtype
    grad: bool
    autocast: tuple[tuple[bool, torch.dtype], ...]

    @classmethod
    def capture(cls) -> EntryModes:
        """Capture the current modes."""
        autocast = tuple((torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in _DEVICES)
        return cls(torch.get_default_dtype(), torch.is_grad_enabled(), autocast)

    def restore(self) -> None:
        """Restore the captured modes."""
        torch.set_default_dtype(self.dtype)
        torch.set_grad_enabled(self.grad)
        for device, (is_on, dtype) in zip(_DEVICES, self.autocast):
            torch.set_autocast_enabled(device, is_on)
            torch.set_autocast_dtype(device, dtype)
        torch.clear_autocast_cache()
