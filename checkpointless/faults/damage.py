"""Damage to tensors, by which a fault shows that digests find it.

Tensors are torch's, and are not typed as such: this room does not import torch, a process that trains has done so.
"""

from __future__ import annotations

import sys
from typing import Any


def flip_a_bit(tensor: Any) -> None:  # Any: a tensor, of a package that this room does not import
    """Flip the lowest bit of the byte in the middle of ``tensor``.

    Args:
        tensor: a torch tensor of any dtype and shape, contiguous and not empty.
    """
    flat = tensor.detach().reshape(-1).view(sys.modules["torch"].uint8)
    flat[flat.numel() // 2] ^= 1
