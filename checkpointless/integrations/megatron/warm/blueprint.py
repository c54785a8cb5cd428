"""What a model looks like as it was built, so that it is noticed if anybody has changed it since."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

# Where torch keeps the hooks of a module.
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
_MODE = frozenset({"training"})

_Notes = Callable[[torch.nn.Module], frozenset[str]]


def _no_notes(module: torch.nn.Module) -> frozenset[str]:
    return frozenset()


class Blueprint:
    """The structure of modules as they are now: classes, hooks, parameters, buffers, plain attributes.

    Hooks are counted, attributes compared where they are plain numbers and words, and buffers by their shape, which
    suffices for classes that are known to keep nothing else.

    Args:
        modules: the modules.
        notes: returns the attributes of a module that are set anew before they are read.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], notes: _Notes = _no_notes) -> None:
        self._notes = notes
        self._entries = list(self._look(modules))

    def difference(self, modules: Sequence[torch.nn.Module]) -> str | None:
        """Return what is not as it was in ``modules``, as a phrase; None: nothing."""
        now = list(self._look(modules))
        for then, entry in zip(self._entries, now):
            if then != entry:
                return f"{entry[0]} is not as it was built ({_first_difference(then, entry)})"
        if len(now) != len(self._entries):
            return f"the model has {len(now)} parts, and had {len(self._entries)}"
        return None

    def _look(self, modules: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Any]]:
        for index, module in enumerate(modules):
            for name, each in module.named_modules(remove_duplicate=False):
                yield f"{type(each).__name__} {name or index}", self._entry(each)

    def _entry(self, module: torch.nn.Module) -> tuple[Any, ...]:
        values, passing = vars(module), _MODE | self._notes(module)
        return (
            type(module),
            {kind: len(values[kind]) for kind in _HOOKS if values.get(kind)},
            {key: value for key, value in values.items() if isinstance(value, _PLAIN) and key not in passing},
            {key: _marks_of(value) for key, value in module._parameters.items() if value is not None},
            {key: value.shape if value is not None else None for key, value in module._buffers.items()},
            sorted(values.keys() - passing),
            list(module._modules),
        )


def _marks_of(parameter: torch.Tensor) -> tuple[object, ...]:
    after = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return id(parameter), parameter.requires_grad, len(parameter._backward_hooks or {}), len(after)


def _first_difference(then: tuple[str, Any], now: tuple[str, Any]) -> str:
    names = ("class", "hooks", "attributes", "parameters", "buffers", "names of attributes", "parts")
    for name, before, after in zip(names, then[1], now[1]):
        if isinstance(before, dict) and before != after:
            return f"{name}: {next(key for key in (*before, *after) if before.get(key) != after.get(key))}"
        if before != after:
            return f"{name}: {', '.join(map(str, {*before} ^ {*after}))}" if isinstance(before, list) else name
    return "name"
