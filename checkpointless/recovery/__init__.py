"""Recovery of the training state: which ranks are healthy and at which step, who sends what to whom.

The package also moves the state and checks it. Of the frameworks it knows only torch.
"""

from checkpointless.recovery.checksum import MemoryChecksumManager
from checkpointless.recovery.local import LocalCheckpointError, LocalCheckpointManager
from checkpointless.recovery.manager import CheckpointManager
from checkpointless.recovery.peft import PEFTCheckpointManager
from checkpointless.recovery.plain import PlainTraining
from checkpointless.recovery.replication import (
    CliqueReplicationStrategy,
    LazyCliqueReplicationStrategy,
    NoReplicasAvailableError,
    ReplicationStrategy,
)
from checkpointless.recovery.worker_streams import Place, seed_data_workers

__all__ = [
    "CheckpointManager",
    "CliqueReplicationStrategy",
    "LazyCliqueReplicationStrategy",
    "LocalCheckpointError",
    "LocalCheckpointManager",
    "MemoryChecksumManager",
    "NoReplicasAvailableError",
    "PEFTCheckpointManager",
    "Place",
    "PlainTraining",
    "ReplicationStrategy",
    "seed_data_workers",
]
