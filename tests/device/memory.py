"""Provide the memory of the test device, which is counted and may be limited.

The machine has one memory, so every tensor counts, also those that a GPU's host would keep.
"""

from __future__ import annotations

import threading
import weakref

import torch


class Memory:
    """Counts the bytes of all storages that live.

    Attributes:
        limit: how many bytes there are; None: as many as the machine has.
        held: bytes that are held.
        most: most bytes that were held at once since the last :meth:`reset_peak`.
    """

    def __init__(self) -> None:
        self.limit: int | None = None
        self.held = self.most = 0
        self._mutex = threading.RLock()  # a storage may end while another is counted
        self._sizes: dict[int, int] = {}

    def count(self, tensor: torch.Tensor) -> None:
        """Count the storage of ``tensor``, if it is a new one or has another size than before.

        Raises:
            torch.OutOfMemoryError: there is no room for it.
        """
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        with self._mutex:
            known = self._sizes.get(key)
            if known == size:
                return
            if known is None:
                weakref.finalize(storage, self._ended, key)
            self._sizes[key] = size
            self.held += size - (known or 0)
            self.most = max(self.most, self.held)
            held = self.held
        if self.limit is not None and held > self.limit:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {held} bytes are held, and there are {self.limit}")

    def reset_peak(self) -> None:
        """Begin to look for the most anew."""
        with self._mutex:
            self.most = self.held

    def _ended(self, key: int) -> None:
        with self._mutex:
            self.held -= self._sizes.pop(key, 0)
