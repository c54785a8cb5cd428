"""What is replaced in NeMo, so that it loads a checkpoint and trains a LoRA without TransformerEngine."""

import sys

from checkpointless.megatron.cpu.replacements import itself
from checkpointless.patches import Patch

_CHECKPOINT_IO = "nemo.lightning.io.pl"
_LORA = "nemo.collections.llm.peft.lora"
_PEFT_UTILS = "nemo.collections.llm.peft.utils"


def rows() -> list[Patch]:
    """Return the replacements in those modules of NeMo that have been imported.

    The other modules are skipped, because importing NeMo takes ten seconds.
    """
    table: list[Patch] = []
    checkpoint_io = sys.modules.get(_CHECKPOINT_IO)
    if checkpoint_io is not None:
        why = "it wants CUDA to be initialized, to move what was loaded to the current device"
        table.append(Patch(checkpoint_io, "_fix_tensors_device", lambda _: itself, why))
    lora = sys.modules.get(_LORA)
    if lora is not None and not getattr(lora, "HAVE_TE", True):
        why = "it asks of every layer whether it is TransformerEngine's, which raises where that is not installed"
        table.append(Patch(lora, "te", lambda _: _NoTransformerEngine, why))
        why = "it takes Megatron's names of TransformerEngine's layers for the layers, where they are None"
        table.append(Patch(sys.modules[_PEFT_UTILS], "HAVE_TE", lambda _: False, why))
    return table


class _NoTransformerEngine:
    """Stand-in for `transformer_engine.pytorch`, of whose layers no instance exists."""

    Linear = type("Linear", (), {})
