"""Recovery for trainings with Megatron-Bridge: ``checkpointless.bridge`` has its public names."""

from __future__ import annotations

from checkpointless.integrations.megatron import cpu_platform

if cpu_platform.requested():
    cpu_platform.install()

# After the platform, without which this fails on CPUs.
from checkpointless.integrations.megatron_bridge.entry import finetune, pretrain

__all__ = ["finetune", "pretrain"]
