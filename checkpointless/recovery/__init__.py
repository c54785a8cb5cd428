"""Who is healthy, at which step, who sends what to whom; moving the state and checking it. Knows torch only."""

from checkpointless.recovery.checksum import MemoryChecksumManager
from checkpointless.recovery.manager import CheckpointManager
from checkpointless.recovery.peft import PEFTCheckpointManager
from checkpointless.recovery.plain import PlainTraining

__all__ = ["CheckpointManager", "MemoryChecksumManager", "PEFTCheckpointManager", "PlainTraining"]
