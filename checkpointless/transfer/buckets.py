"""Plan how the bytes of a state are cut into messages: pure functions of the tensors' sizes, equal at both ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Size of a bucket that small tensors share: a smaller one means more messages, a larger one leaves the caches.
PACKED_BYTES = 4 * 1024 * 1024
#: How many buckets are under way at once.
IN_FLIGHT = 8
#: Largest bucket on a wire that runs ahead, where a message costs more than the bytes of a small one.
AHEAD_BYTES = 128 * 1024 * 1024
_WHOLE = 2  # a tensor of at least 1 / _WHOLE of a shared bucket is sent from where it lies, and not packed


@dataclass(frozen=True)
class Slice:
    """Bytes ``start`` to ``stop`` (exclusive) of the tensor with number ``index``."""

    index: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """The slice's length in bytes."""
        return self.stop - self.start


Bucket = tuple[Slice, ...]


def bucket_bytes_of(memory_budget_bytes: int, ahead: bool) -> int:
    """Return the size of a bucket with which the buffers of the buckets in flight stay within the budget.

    On the CPU this is an eighth of the budget, because eight buckets are in flight. On a wire that runs ahead (see
    :mod:`checkpointless.transfer.exchange`) a bucket may take the whole budget, up to 128 MiB: most need no buffer,
    and the buffers of all others in flight take no more than one bucket
    (:class:`~checkpointless.transfer.bucket_rounds.Window`).

    Args:
        memory_budget_bytes: how many bytes the buffers may take, at least 1.
        ahead: whether the wire runs ahead.
    """
    return min(AHEAD_BYTES, memory_budget_bytes) if ahead else max(1, memory_budget_bytes // IN_FLIGHT)


def _shared_bytes_of(bucket_bytes: int, ahead: bool) -> int:
    """Return the size of a bucket that small tensors share: both ends find the same, as they use the same wire.

    Args:
        ahead: whether the wire runs ahead; then so many are in flight as fit into the buffers.
    """
    return max(1, bucket_bytes // IN_FLIGHT) if ahead else min(PACKED_BYTES, bucket_bytes)


def plan_buckets(sizes: Sequence[int], bucket_bytes: int, ahead: bool = False) -> list[Bucket]:
    """Cut tensors into buckets of at most ``bucket_bytes``. Empty tensors need no bucket.

    A large tensor gets separate buckets, so that it can be sent and received without a copy; small tensors share
    buckets.

    Args:
        sizes: the tensors' sizes in bytes.
        ahead: whether the wire runs ahead.

    Raises:
        ValueError: ``bucket_bytes`` is not positive.
    """
    if bucket_bytes < 1:
        raise ValueError(f"a bucket of {bucket_bytes} bytes holds nothing")
    room = _shared_bytes_of(bucket_bytes, ahead)
    buckets: list[Bucket] = []
    shared: list[Slice] = []
    filled = 0
    for index, size in enumerate(sizes):
        if size * _WHOLE >= room:
            buckets += [
                (Slice(index, start, min(start + bucket_bytes, size)),) for start in range(0, size, bucket_bytes)
            ]
        elif size:
            if filled + size > room:
                buckets.append(tuple(shared))
                shared, filled = [], 0
            shared.append(Slice(index, 0, size))
            filled += size
    if shared:
        buckets.append(tuple(shared))
    return buckets


def size_of(bucket: Bucket) -> int:
    """Return the bucket's length in bytes."""
    return sum(part.nbytes for part in bucket)


def stripe(count: int, place: int, places: int) -> list[int]:
    """Return the numbers of the buckets that the holder at ``place`` of ``places`` sends in the first round."""
    return list(range(place, count, places))


@dataclass(frozen=True)
class Shares:
    """All buckets of a transfer, and which holder sends which bucket.

    Attributes:
        buckets: the buckets of the shard, then those of the tensors inside the objects.
        alike: the places of the holders whose objects contain the same tensors as the first holder's.
    """

    buckets: list[Bucket]
    first: int
    places: int
    alike: Sequence[int]
    bucket_bytes: int

    @classmethod
    def of(
        cls,
        shard: Sequence[int],
        inside: Sequence[int],
        bucket_bytes: int,
        places: int,
        alike: Sequence[int],
        ahead: bool = False,
    ) -> Shares:
        """Plan the buckets of a shard and of the tensors inside the objects.

        Args:
            shard: sizes of the shard's tensors in bytes.
            inside: sizes of the tensors inside the objects in bytes.
            alike: the places of the holders whose objects contain the same tensors as the first holder's.
            ahead: whether the wire runs ahead.
        """
        of_shard = plan_buckets(shard, bucket_bytes, ahead)
        of_objects = [
            tuple(Slice(len(shard) + part.index, part.start, part.stop) for part in bucket)
            for bucket in plan_buckets(inside, bucket_bytes, ahead)
        ]
        return cls(of_shard + of_objects, len(of_shard), places, alike, bucket_bytes)

    def sender(self, index: int, attempt: int) -> int:
        """Return the place of the holder that sends a bucket; each attempt takes the next one, if there is one."""
        if index < self.first:
            return (index + attempt) % self.places
        return self.alike[(index - self.first + attempt) % len(self.alike)]

    def split(self, indices: Iterable[int], attempt: int) -> list[list[int]]:
        """Return ``indices`` by the place of their sender, each list in ascending order."""
        wanted: list[list[int]] = [[] for _ in range(self.places)]
        for index in sorted(indices):
            wanted[self.sender(index, attempt)].append(index)
        return wanted
