"""Checkpoints in a directory of the node: the rung below recovery from memory and above shared storage."""

from checkpointless.local_checkpoint.manager import LocalCheckpointError, LocalCheckpointManager
from checkpointless.local_checkpoint.replication import (
    CliqueReplicationStrategy,
    LazyCliqueReplicationStrategy,
    NoReplicasAvailableError,
    ReplicationStrategy,
)

__all__ = [
    "CliqueReplicationStrategy",
    "LazyCliqueReplicationStrategy",
    "LocalCheckpointError",
    "LocalCheckpointManager",
    "NoReplicasAvailableError",
    "ReplicationStrategy",
]
