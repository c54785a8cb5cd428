"""Torch's modes and the working directory at the entry of the block, which are the same at every entry.

A script may change one for a while, as loaders of pretrained weights do with the default dtype, or for good, as
with ``os.chdir("outputs")``. A fault would leave it changed in the processes that live on, and in no other.
"""

from __future__ import annotations

import os
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
        folder: the working directory; None: it is gone.
    """

    dtype: torch.dtype
    grad: bool
    autocast: tuple[tuple[bool, torch.dtype], ...]
    folder: str | None

    @classmethod
    def capture(cls) -> EntryModes:
        """Capture the current modes."""
        autocast = tuple((torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in _DEVICES)
        try:
            folder = os.getcwd()
        except FileNotFoundError:
            folder = None
        return cls(torch.get_default_dtype(), torch.is_grad_enabled(), autocast, folder)

    def restore(self) -> None:
        """Restore the captured modes.

        Raises:
            OSError: the working directory cannot be entered any more.
        """
        if self.folder is not None:
            os.chdir(self.folder)
        torch.set_default_dtype(self.dtype)
        torch.set_grad_enabled(self.grad)
        for device, (is_on, dtype) in zip(_DEVICES, self.autocast):
            torch.set_autocast_enabled(device, is_on)
            torch.set_autocast_dtype(device, dtype)
        torch.clear_autocast_cache()
