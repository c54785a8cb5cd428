"""Checkpoints in a directory of the node: the rung below recovery from memory and above shared storage."""

from checkpointless.local_checkpoint.agreement import LocalCheckpointError
from checkpointless.local_checkpoint.cliques import NoReplicasAvailableError
from checkpointless.local_checkpoint.manager import LocalCheckpointManager
from checkpointless.local_checkpoint.replication import (
    CliqueReplicationStrategy,
    LazyCliqueReplicationStrategy,
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
