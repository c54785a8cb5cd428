"""Values and tensors as bytes, and their digests. Nothing is pickled or evaluated."""

from checkpointless.state.serialization.digest import MemoryChecksumManager

__all__ = ["MemoryChecksumManager"]
