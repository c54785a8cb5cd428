"""Checkpointless: in-process recovery for PyTorch Lightning, NeMo and Megatron-core.

The public names that need no framework can be imported from here. Each is loaded on first access, so importing this
package imports nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkpointless.inprocess import (
        Abort,
        AbortTransformerEngine,
        CheckpointlessAbortManager,
        CheckpointlessFinalizeCleanup,
        Compose,
        CudaHealthCheck,
        Finalize,
        HealthCheck,
        HealthCheckError,
        HPAbortTorchDistributed,
        HPCallWrapper,
        HPCheckpointingAbort,
        HPDataLoaderAbort,
        HPState,
        HPWrapper,
        InternalError,
        ParameterUpdateLock,
        RankShouldRestart,
        UnrecoverableError,
    )
    from checkpointless.integrations.torch import PlainTraining, Value
    from checkpointless.launcher.client import HPAgentK8sAPIFactory, wait_rank
    from checkpointless.recovery import CheckpointManager, PEFTCheckpointManager
    from checkpointless.replication.local_checkpoint import (
        CliqueReplicationStrategy,
        LazyCliqueReplicationStrategy,
        LocalCheckpointError,
        LocalCheckpointManager,
        NoReplicasAvailableError,
        ReplicationStrategy,
    )
    from checkpointless.state.module_tensors import register_optimizer_state
    from checkpointless.state.serialization import MemoryChecksumManager

__all__ = [
    "Abort",
    "AbortTransformerEngine",
    "CheckpointManager",
    "CheckpointlessAbortManager",
    "CheckpointlessFinalizeCleanup",
    "CliqueReplicationStrategy",
    "Compose",
    "CudaHealthCheck",
    "Finalize",
    "HPAbortTorchDistributed",
    "HPAgentK8sAPIFactory",
    "HPCallWrapper",
    "HPCheckpointingAbort",
    "HPDataLoaderAbort",
    "HPState",
    "HPWrapper",
    "HealthCheck",
    "HealthCheckError",
    "InternalError",
    "LazyCliqueReplicationStrategy",
    "LocalCheckpointError",
    "LocalCheckpointManager",
    "MemoryChecksumManager",
    "NoReplicasAvailableError",
    "PEFTCheckpointManager",
    "ParameterUpdateLock",
    "PlainTraining",
    "RankShouldRestart",
    "ReplicationStrategy",
    "UnrecoverableError",
    "Value",
    "register_optimizer_state",
    "wait_rank",
]

_ELSEWHERE = {
    "CheckpointManager": "recovery",
    "CliqueReplicationStrategy": "replication.local_checkpoint",
    "HPAgentK8sAPIFactory": "launcher.client",
    "LazyCliqueReplicationStrategy": "replication.local_checkpoint",
    "LocalCheckpointError": "replication.local_checkpoint",
    "LocalCheckpointManager": "replication.local_checkpoint",
    "MemoryChecksumManager": "state.serialization",
    "NoReplicasAvailableError": "replication.local_checkpoint",
    "PEFTCheckpointManager": "recovery",
    "PlainTraining": "integrations.torch",
    "ReplicationStrategy": "replication.local_checkpoint",
    "Value": "integrations.torch",
    "register_optimizer_state": "state.module_tensors",
    "wait_rank": "launcher.client",
}


def __getattr__(name: str) -> Any:
    """Load a public name from the subpackage that defines it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_ELSEWHERE.get(name, 'inprocess')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the names of this module, including those that are not loaded yet."""
    return sorted({*globals(), *__all__})
