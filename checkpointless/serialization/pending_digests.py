"""Digests that are computed while other work goes on, and fetched from the device all at once."""

from __future__ import annotations

import torch
import xxhash

from checkpointless.serialization.device_digest import digest_tensor, unsigned
from checkpointless.serialization.tensor_memory import is_on_host


class PendingDigests:
    """Collects digests in order. Those of bytes on the host are computed at once.

    Those of bytes on a device are launched there. The host waits for the device once, when they are fetched.
    Digests of the two kinds cannot be compared.
    """

    def __init__(self) -> None:
        self._digests: list[int | torch.Tensor] = []

    def add(self, flat: torch.Tensor) -> None:
        """Digest a flat uint8 tensor, which may be changed by whatever is launched afterwards."""
        if is_on_host(flat):
            self._digests.append(xxhash.xxh3_64_intdigest(flat.numpy().data))
        else:
            self._digests.append(digest_tensor(flat))

    def add_known(self, digest: int) -> None:
        """Add a digest that is known."""
        self._digests.append(digest)

    def fetch(self) -> list[int]:
        """Return all digests in the order in which they were added, and wait for each device once."""
        found: list[int] = []
        waiting = [each for each in self._digests if isinstance(each, torch.Tensor)]
        by_device = {
            device: [each for each in waiting if each.device == device]
            for device in {each.device for each in waiting}
        }
        fetched = {device: iter(torch.stack(each).tolist()) for device, each in by_device.items()}  # waits for it
        for digest in self._digests:
            found.append(unsigned(next(fetched[digest.device])) if isinstance(digest, torch.Tensor) else digest)
        return found
