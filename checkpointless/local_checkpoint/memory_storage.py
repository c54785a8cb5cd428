"""Parts in this process's memory: the quickest place to keep them, which is lost with the process."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from checkpointless.local_checkpoint.content import Content
from checkpointless.local_checkpoint.part_id import PartId, SaveId
from checkpointless.local_checkpoint.part_storage import PartError, Shelf, StoredPart
from checkpointless.serialization.tensor_memory import tensor_bytes


@dataclass(frozen=True)
class KeptPart:
    """A part in memory.

    Attributes:
        id: the part.
        content: its content, which nobody changes.
        digests: the xxh3-64 of the structure, and of each tensor.
    """

    id: PartId
    content: Content
    digests: tuple[int, ...]

    def verify(self) -> None:
        """Compare every digest.

        Raises:
            PartError: the memory has changed.
        """
        if content_digests(self.content) != self.digests:
            raise PartError(f"{self.id.words} has changed in memory")

    def read(self) -> Content:
        """Return a copy of the content, after comparing every digest.

        Raises:
            PartError: the memory has changed.
        """
        self.verify()
        return self.content.on_host(copy=True)


class MemoryStorage:
    """Keeps parts in the memory of this process, which alone uses it.

    It is a :class:`~checkpointless.local_checkpoint.part_storage.PartStorage`.

    Args:
        takes_over: keep the contents that are written as they are. Whoever writes one must not use it afterwards.
    """

    def __init__(self, takes_over: bool = False) -> None:
        self._takes_over = takes_over
        self._parts: Mapping[PartId, KeptPart] = {}  # replaced, not changed: threads read it
        self._lock = threading.Lock()  # of replacements

    def copy(self) -> MemoryStorage:
        """Return a storage with the same parts, which what is done to this one does not change."""
        copied = type(self)(self._takes_over)
        copied._parts = self._parts
        return copied

    def write(self, parts: Sequence[tuple[PartId, Content]], holder: int, world_size: int) -> None:
        """Keep parts, and compute their digests."""
        kept = {}
        for part, content in parts:
            whole = content if self._takes_over else content.on_host(copy=True)
            kept[part] = KeptPart(part, whole, content_digests(whole))
        with self._lock:
            self._parts = {**self._parts, **kept}

    def shelf(self, holder: int, world_size: int) -> Shelf:
        """Return all parts, by save and part."""
        shelf: dict[SaveId, dict[int, list[StoredPart]]] = defaultdict(dict)
        for part, kept in self._parts.items():
            shelf[part.save][part.part] = [kept]
        return shelf

    def delete(self, save: SaveId) -> None:
        """Forget one save."""
        with self._lock:
            self._parts = {part: kept for part, kept in self._parts.items() if part.save != save}

    def delete_all_but(self, keep: Collection[SaveId | None]) -> None:
        """Forget the saves that are not in ``keep``."""
        with self._lock:
            self._parts = {part: kept for part, kept in self._parts.items() if part.save in keep}


def content_digests(content: Content) -> tuple[int, ...]:
    """Return the xxh3-64 of the structure of ``content``, and of each of its tensors, which are on the host."""
    digests = [xxhash.xxh3_64_intdigest(content.structure)]
    digests += [xxhash.xxh3_64_intdigest(tensor_bytes(tensor).numpy().data) for tensor in content.tensors]
    return tuple(digests)
