"""Lightning strategies of checkpointless: NeMo's Megatron strategy with recovery, connector and auto-resume."""

from checkpointless.strategies.connector import CheckpointlessCompatibleConnector
from checkpointless.strategies.enable import enable
from checkpointless.strategies.megatron_strategy import CheckpointlessMegatronStrategy
from checkpointless.strategies.resume import CheckpointlessAutoResume

__all__ = [
    "CheckpointlessAutoResume",
    "CheckpointlessCompatibleConnector",
    "CheckpointlessMegatronStrategy",
    "enable",
]
