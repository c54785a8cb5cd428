"""What a model looks like as it was built, so that it is noticed if anybody has changed it since."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.utils import get_te_version

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
_PASSING = frozenset({"training", "current_microbatch"})  # put back, or set anew before it is read

# What a forward pass of TransformerEngine's modules sets before it reads it.
_PASSING_OF_ENGINE = frozenset(
    {
        *("activation_dtype", "allow_different_data_and_param_types", "forwarded_at_least_once", "fp8_parameters"),
        *(
            "is_first_microbatch",
            "attn_mask_type",
            "input_in_bf16",
            "input_in_float16",
            "input_in_fp16",
            "align_size",
        ),
    }
)

#: Packages whose modules keep nothing from step to step but parameters and buffers.
KNOWN = ("megatron.core.", "nemo.", "torch.nn.", "checkpointless.", "builtins.", "abc.", "typing.")
#: Packages of which only modules with these names are known: no whole layers, for example. Without FP8, user
#: buffers and delayed gradients, of which the configuration says, these keep nothing either.
_ENGINE = ("transformer_engine.", "megatron.core.extensions.")
_KNOWN_OF_ENGINE = (
    "megatron.core.extensions.transformer_engine.TE",
    *(f"transformer_engine.pytorch.{each}." for each in ("attention", "module", "ops.basic", "ops.op")),
)
#: The first and the last version of TransformerEngine whose sources were read.
VERSIONS = ((2, 6), (2, 12))


def unknown_class(modules: Iterable[torch.nn.Module]) -> str | None:
    """Return the name of a class of which it is not known what it keeps from step to step; None: there is none."""
    for module in modules:
        for each in module.modules():
            for kind in _kinds_of(each):
                if not kind.startswith(_KNOWN_OF_ENGINE if kind.startswith(_ENGINE) else KNOWN):
                    return kind
            if is_of_engine(each):
                release = get_te_version().release[:2]
                if not VERSIONS[0] <= release <= VERSIONS[1]:
                    return f"TransformerEngine {'.'.join(map(str, release))}"
    return None


def is_of_engine(module: torch.nn.Module) -> bool:
    """Return whether a module is one of TransformerEngine's."""
    return any(kind.startswith(_ENGINE) for kind in _kinds_of(module))


def _kinds_of(module: torch.nn.Module) -> list[str]:
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__]


class Blueprint:
    """The structure of modules as they are now: classes, hooks, parameters, buffers, plain attributes.

    Hooks are counted, attributes compared where they are plain numbers and words, and buffers by their shape, which
    suffices for classes that are known to keep nothing else. What each forward pass sets again is left out.

    Args:
        modules: the modules.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
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
        values = vars(module)
        names = values.keys() - _PASSING - (_PASSING_OF_ENGINE if is_of_engine(module) else set())
        return (
            type(module),
            {kind: len(values[kind]) for kind in _HOOKS if values.get(kind)},
            {key: values[key] for key in names if isinstance(values[key], _PLAIN)},
            {key: _marks_of(value) for key, value in module._parameters.items() if value is not None},
            {key: value.shape if value is not None else None for key, value in module._buffers.items()},
            sorted(names),
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
