"""Checkpoints in a directory of the node: the level below recovery from memory and above shared storage."""

from checkpointless.replication.agreement import LocalCheckpointError, NoReplicasAvailableError
from checkpointless.replication.local_checkpoint.manager import AsyncRequest, AsyncSave, LocalCheckpointManager
from checkpointless.replication.local_checkpoint.replication import (
    CliqueReplicationStrategy,
    GroupWrapper,
    LazyCliqueReplicationStrategy,
    LazyReplicationStrategyBuilder,
    ReplicationStrategy,
)
from checkpointless.replication.local_checkpoint.tensor_aware import (
    BasicTensorAwareStateDict,
    TensorAwareStateDict,
    register_form,
)

__all__ = [
    "AsyncRequest",
    "AsyncSave",
    "BasicTensorAwareStateDict",
    "CliqueReplicationStrategy",
    "GroupWrapper",
    "LazyCliqueReplicationStrategy",
    "LazyReplicationStrategyBuilder",
    "LocalCheckpointError",
    "LocalCheckpointManager",
    "NoReplicasAvailableError",
    "ReplicationStrategy",
    "TensorAwareStateDict",
    "register_form",
]
