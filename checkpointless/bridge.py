"""Recovery for trainings with Megatron-Bridge: ``pretrain`` and ``finetune`` in the places of Bridge's own.

    from checkpointless import HPWrapper
    from checkpointless.bridge import pretrain

    @HPWrapper()
    def main():
        pretrain(config(), forward_step)

Importing this package imports Megatron-Bridge. If the job was started with ``--cpu``, import it before
``megatron.bridge``, which can be imported without TransformerEngine then.
"""

from __future__ import annotations

from checkpointless.integrations.megatron_bridge import finetune, pretrain

__all__ = ["finetune", "pretrain"]
