"""What a rank that lives through a fault keeps built: modules, DDP's buffers and optimizer, bound to new groups."""

from checkpointless.integrations.megatron.warm.kept_model import KeptModel
from checkpointless.integrations.megatron.warm.old_memory import OldMemory

__all__ = ["KeptModel", "OldMemory"]
