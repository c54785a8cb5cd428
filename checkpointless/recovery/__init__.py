"""Recovery of the training state: which ranks are healthy and at which step, who sends what to whom.

The package also moves the state and checks it. Of the frameworks it knows only torch.
"""

from checkpointless.inprocess.worker_streams import Place, seed_data_workers
from checkpointless.recovery.manager import CheckpointManager, PEFTCheckpointManager
from checkpointless.replication.agreement import LocalCheckpointError, NoReplicasAvailableError
from checkpointless.replication.local_checkpoint import (
    CliqueReplicationStrategy,
    LazyCliqueReplicationStrategy,
    LocalCheckpointManager,
    ReplicationStrategy,
)
from checkpointless.replication.tiers import LocalDirectory, NeighborMemory, SharedDirectory, Tier
from checkpointless.state.serialization.digest import MemoryChecksumManager

__all__ = [
    "CheckpointManager",
    "CliqueReplicationStrategy",
    "LazyCliqueReplicationStrategy",
    "LocalCheckpointError",
    "LocalCheckpointManager",
    "LocalDirectory",
    "MemoryChecksumManager",
    "NeighborMemory",
    "NoReplicasAvailableError",
    "PEFTCheckpointManager",
    "Place",
    "ReplicationStrategy",
    "SharedDirectory",
    "Tier",
    "seed_data_workers",
]
