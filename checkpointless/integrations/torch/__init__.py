"""Recovery in a training loop of one's own over torch: plain, DDP, FSDP2."""

from checkpointless.integrations.torch.loop import Value
from checkpointless.integrations.torch.plain import PlainTraining

__all__ = ["PlainTraining", "Value"]
