"""Stop what a rank is doing, from the fault thread, while the main thread may be blocked in it."""

from checkpointless.inprocess.abort.base import Abort
from checkpointless.inprocess.abort.communicators import HPAbortTorchDistributed
from checkpointless.inprocess.abort.composition import CheckpointlessAbortManager
from checkpointless.inprocess.abort.trainer import HPCheckpointingAbort, HPDataLoaderAbort
from checkpointless.inprocess.abort.transformer_engine import AbortTransformerEngine

__all__ = [
    "Abort",
    "AbortTransformerEngine",
    "CheckpointlessAbortManager",
    "HPAbortTorchDistributed",
    "HPCheckpointingAbort",
    "HPDataLoaderAbort",
]
