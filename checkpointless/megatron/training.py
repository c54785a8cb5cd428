"""Recovery in a training loop over Megatron-core."""

from checkpointless.integrations.megatron.training import MegatronTraining

__all__ = ["MegatronTraining"]
