"""What one rank sends another about a tensor, before any of its bytes travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from checkpointless.state.serialization.tensor_memory import dtype_name, dtype_of

if TYPE_CHECKING:
    from checkpointless.launcher.protocol.causes import Json, Parsed

Key = tuple[str | int, ...]


@dataclass(frozen=True)
class TensorEntry:
    """What another rank must know to make a tensor, on a kind of device (``cpu`` or ``cuda``), and check it."""

    key: Key
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    digest: int | None = None

    @classmethod
    def of(cls, key: Key, tensor: torch.Tensor, digest: int | None = None) -> TensorEntry:
        return cls(key, tensor.dtype, tuple(tensor.shape), tensor.device.type, digest)

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def fits(self, tensor: torch.Tensor | None) -> bool:
        return tensor is not None and tensor.dtype == self.dtype and tuple(tensor.shape) == self.shape

    def to_json(self) -> list[Json]:
        return [list(self.key), dtype_name(self.dtype), list(self.shape), self.device, self.digest]

    @classmethod
    def from_json(cls, data: Sequence[Parsed]) -> TensorEntry:
        """Return the entry that :meth:`to_json` encoded; raise ``ValueError`` if the dtype is unknown."""
        key, dtype, shape, device, digest = data
        return cls(tuple(key), dtype_of(dtype), tuple(shape), device, digest)
