"""The classes of which it is known what they keep from step to step, so that a model of them may stay built."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from checkpointless.integrations.megatron.warm import transformer_engine
from checkpointless.integrations.megatron.warm.blueprint import Blueprint

#: Packages whose modules keep nothing from step to step but parameters and buffers.
KNOWN = ("megatron.core.", "nemo.", "torch.nn.", "checkpointless.", "builtins.", "abc.", "typing.")
_PASSING = frozenset({"current_microbatch"})  # Megatron sets it anew before it is read


def blueprint_of(modules: Sequence[torch.nn.Module]) -> Blueprint:
    """Return the structure of modules as they are now, without what the frameworks set anew before it is read."""
    return Blueprint(modules, lambda module: _PASSING | transformer_engine.notes_of(module))


def unknown_class(modules: Sequence[torch.nn.Module]) -> str | None:
    """Return the name of a class of which it is not known what it keeps from step to step; None: there is none."""
    for module in modules:
        for each in module.modules():
            for kind in transformer_engine.kinds_of(each):
                if kind.startswith(transformer_engine.PACKAGES):
                    if kind not in transformer_engine.CLASSES:
                        return kind
                elif not kind.startswith(KNOWN):
                    return kind
    return None
