"""Recovery for trainings with Megatron-Bridge: ``pretrain`` and ``finetune`` in the places of Bridge's own.

    from checkpointless import HPWrapper
    from checkpointless.bridge import pretrain

    @HPWrapper()
    def main():
        pretrain(config(), forward_step)

Importing this package imports Megatron-Bridge.
"""

from __future__ import annotations

from checkpointless.bridge.entry import finetune, pretrain

__all__ = ["finetune", "pretrain"]
