"""What a model looks like as it was built, so that it is noticed if anybody has changed it since."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from checkpointless.megatron.warm import transformer_engine

#: Packages whose modules keep nothing from step to step but parameters and buffers.
KNOWN = ("megatron.core.", "nemo.", "torch.nn.", "checkpointless.", "builtins.", "abc.", "typing.")
#: Where torch keeps the hooks of a module.
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_PLAIN = (bool, int, float, str, torch.dtype)  # None may become a tensor that every step makes anew

#: Attributes that the frameworks set anew before they are read.
_PASSING = frozenset({"training", "current_microbatch"})


class Blueprint:
    """The structure of modules as they are now: classes, hooks, parameters, buffers, plain attributes.

    Args:
        modules: the modules.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._entries = list(_entries(modules))

    def difference(self, modules: Sequence[torch.nn.Module]) -> str | None:
        """Return what is not as it was in ``modules``, as a phrase; None: nothing."""
        now = list(_entries(modules))
        for then, entry in zip(self._entries, now):
            if then != entry:
                return f"{entry[0]} is not as it was built ({_first_difference(then, entry)})"
        if len(now) != len(self._entries):
            return f"the model has {len(now)} parts, and had {len(self._entries)}"
        return None


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


def _entries(modules: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Any]]:
    for index, module in enumerate(modules):
        for name, each in module.named_modules(remove_duplicate=False):
            values, passing = vars(each), _PASSING | transformer_engine.notes_of(each)
            hooks = {kind: len(values[kind]) for kind in _HOOKS if values.get(kind)}
            plain = {
                key: value for key, value in values.items() if isinstance(value, _PLAIN) and key not in passing
            }
            parameters = {
                key: (id(value), value.requires_grad, len(value._backward_hooks or ()), _after_accumulation(value))
                for key, value in each._parameters.items()
                if value is not None
            }
            buffers = {key: value.shape if value is not None else None for key, value in each._buffers.items()}
            yield (
                f"{type(each).__name__} {name or index}",
                (
                    type(each),
                    hooks,
                    plain,
                    parameters,
                    buffers,
                    sorted(values.keys() - passing),
                    list(each._modules),
                ),
            )


def _after_accumulation(parameter: torch.Tensor) -> int:
    return len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ())


def _first_difference(then: tuple[str, Any], now: tuple[str, Any]) -> str:
    names = ("class", "hooks", "attributes", "parameters", "buffers", "names of attributes", "parts")
    for name, before, after in zip(names, then[1], now[1]):
        if isinstance(before, dict) and before != after:
            return f"{name}: {next(key for key in (*before, *after) if before.get(key) != after.get(key))}"
        if before != after:
            return f"{name}: {', '.join(map(str, {*before} ^ {*after}))}" if isinstance(before, list) else name
    return "name"
