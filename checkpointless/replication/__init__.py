"""Where copies are kept and how they get there: stores of parts, the exchange with peers, the copier.

Tiers (:mod:`checkpointless.replication.tiers`), local checkpoints
(:mod:`checkpointless.replication.local_checkpoint`) and copies of Megatron's checkpoints
(:mod:`checkpointless.integrations.megatron.dist_checkpoint`) are its front ends.
"""

from checkpointless.replication.store import (
    DirectoryStore,
    MemoryStore,
    PartStore,
    StoredPart,
    open_store,
    register_store,
)

__all__ = ["DirectoryStore", "MemoryStore", "PartStore", "StoredPart", "open_store", "register_store"]
