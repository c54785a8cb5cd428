"""Re-run a block of code inside a living process.

A fault notice interrupts the main thread wherever it is. Communicators are aborted, and the rank leaves the block,
cleans up and enters the block again together with every other rank. It uses torch, but no training framework.
"""

from checkpointless.inprocess.abort import (
    Abort,
    AbortTransformerEngine,
    CheckpointlessAbortManager,
    Compose,
    HPAbortTorchDistributed,
    HPCheckpointingAbort,
    HPDataLoaderAbort,
)
from checkpointless.inprocess.exceptions import (
    HealthCheckError,
    InternalError,
    RankShouldRestart,
    StateLostError,
    UnrecoverableError,
)
from checkpointless.inprocess.finalize import CheckpointlessFinalizeCleanup, Finalize
from checkpointless.inprocess.generation import HPState
from checkpointless.inprocess.health_check import CudaHealthCheck, HealthCheck
from checkpointless.inprocess.parameter_update_lock import ParameterUpdateLock
from checkpointless.inprocess.wrap import HPCallWrapper, HPWrapper, active_call_wrapper

__all__ = [
    "Abort",
    "AbortTransformerEngine",
    "CheckpointlessAbortManager",
    "CheckpointlessFinalizeCleanup",
    "Compose",
    "CudaHealthCheck",
    "Finalize",
    "HPAbortTorchDistributed",
    "HPCallWrapper",
    "HPCheckpointingAbort",
    "HPDataLoaderAbort",
    "HPState",
    "HPWrapper",
    "HealthCheck",
    "HealthCheckError",
    "InternalError",
    "ParameterUpdateLock",
    "RankShouldRestart",
    "StateLostError",
    "UnrecoverableError",
    "active_call_wrapper",
]
