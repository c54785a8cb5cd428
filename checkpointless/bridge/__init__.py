"""Recovery for trainings with Megatron-Bridge: ``pretrain`` and ``finetune`` in the places of Bridge's own.

    from checkpointless import HPWrapper
    from checkpointless.bridge import pretrain

    @HPWrapper()
    def main():
        pretrain(config(), forward_step)

Importing this package imports Megatron-Bridge. Where the job was started with ``--cpu``, Bridge is made to train on
CPUs first, so import this package before ``megatron.bridge``.
"""

from __future__ import annotations

from checkpointless.megatron import cpu_platform
from checkpointless.megatron.cpu import megatron_bridge

if cpu_platform.requested():
    cpu_platform.install()
    megatron_bridge.import_modules(["megatron.bridge.training.pretrain", "megatron.bridge.training.gpt_step"])
    cpu_platform.install()  # what Bridge needs, now that it is imported

from checkpointless.bridge.entry import finetune, pretrain

__all__ = ["finetune", "pretrain"]
