"""Lightning strategies of checkpointless: NeMo's Megatron strategy with recovery, connector and auto-resume."""

from checkpointless.strategies.checkpoints.connector import CheckpointlessCompatibleConnector
from checkpointless.strategies.checkpoints.copies import KeepCopies, keep_copies
from checkpointless.strategies.checkpoints.resume import CheckpointlessAutoResume
from checkpointless.strategies.megatron_strategy import CheckpointlessMegatronStrategy
from checkpointless.strategies.nemo_run.enable import enable

__all__ = [
    "CheckpointlessAutoResume",
    "CheckpointlessCompatibleConnector",
    "CheckpointlessMegatronStrategy",
    "KeepCopies",
    "enable",
    "keep_copies",
]
