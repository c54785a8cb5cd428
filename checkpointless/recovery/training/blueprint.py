"""What a model looks like as it was built, so that it is noticed if anybody has changed it since."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from checkpointless.recovery.training.attributes import Attributes, UnknownValueError

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
_STRUCTURE = frozenset({"_parameters", "_buffers", "_modules", *_HOOKS})
_PLAIN = (bool, int, float, str, torch.dtype)  # None may become a tensor that every step makes anew
_MODE = frozenset({"training"})

_Notes = Callable[[torch.nn.Module], frozenset[str]]


def _no_notes(module: torch.nn.Module) -> frozenset[str]:
    return frozenset()


class Blueprint:
    """The structure of modules as they are now: classes, hooks, parameters, buffers, plain attributes.

    Args:
        modules: the modules.
        notes: returns the attributes of a module that are set anew before they are read.
        attributes: compares hooks and all attributes by their pictures, and buffers by their identity; what is
            trained is compared elsewhere. None: hooks are counted, attributes compared where they are plain numbers
            and words, and buffers by their shape, which suffices for classes that are known to keep nothing else.

    Raises:
        UnknownValueError: a module keeps something that ``attributes`` cannot compare later.
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        notes: _Notes = _no_notes,
        attributes: Attributes | None = None,
    ) -> None:
        self._look = _Look(notes, attributes)
        self._entries = list(self._look.entries(modules))

    def difference(self, modules: Sequence[torch.nn.Module]) -> str | None:
        """Return what is not as it was in ``modules``, as a phrase; None: nothing."""
        try:
            now = list(self._look.entries(modules))
        except UnknownValueError as error:
            return str(error)
        for then, entry in zip(self._entries, now):
            if then != entry:
                return f"{entry[0]} is not as it was built ({_first_difference(then, entry)})"
        if len(now) != len(self._entries):
            return f"the model has {len(now)} parts, and had {len(self._entries)}"
        return None


class _Look:
    """What is looked at in modules."""

    def __init__(self, notes: _Notes, attributes: Attributes | None) -> None:
        self._notes = notes
        self._attributes = attributes

    def entries(self, modules: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Any]]:
        for index, module in enumerate(modules):
            for name, each in module.named_modules(remove_duplicate=False):
                title = f"{type(each).__name__} {name or index}"
                yield title, self._entry(title, each)

    def _entry(self, title: str, module: torch.nn.Module) -> tuple[Any, ...]:
        values, passing = vars(module), _MODE | self._notes(module)
        hooks = {kind: values[kind] for kind in _HOOKS if values.get(kind)}
        parameters = {
            key: (id(value), *self._marks_of(f"{title}.{key}", value))
            for key, value in module._parameters.items()
            if value is not None
        }
        buffers = {key: self._buffer(value) for key, value in module._buffers.items()}
        return (
            type(module),
            self._pictures(title, hooks) if self._attributes else {kind: len(each) for kind, each in hooks.items()},
            self._plain(title, values, passing),
            parameters,
            buffers,
            sorted(values.keys() - passing),
            {key: id(value) for key, value in module._modules.items()}
            if self._attributes
            else list(module._modules),
        )

    def _plain(self, title: str, values: Mapping[str, Any], passing: frozenset[str]) -> dict[str, object]:
        if self._attributes is None:
            return {key: value for key, value in values.items() if isinstance(value, _PLAIN) and key not in passing}
        apart = passing | _STRUCTURE
        return self._pictures(title, {key: value for key, value in values.items() if key not in apart})

    def _pictures(self, title: str, values: Mapping[str, Any]) -> dict[str, object]:
        assert self._attributes is not None
        found: dict[str, object] = {}
        for key, value in values.items():
            try:
                found[key] = self._attributes.picture(value)
            except UnknownValueError as error:
                raise UnknownValueError(f"{title} keeps in {key} {error}") from None
        return found

    def _marks_of(self, title: str, parameter: torch.Tensor) -> tuple[object, ...]:
        after = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        before = parameter._backward_hooks or {}
        if self._attributes is None:
            return parameter.requires_grad, len(before), len(after)
        return tuple(
            self._pictures(title, {"its hooks": {**before}, "its late hooks": {**after}, **vars(parameter)}).items()
        )

    def _buffer(self, value: torch.Tensor | None) -> object:
        if value is None or self._attributes is None:
            return value.shape if value is not None else None
        return id(value), value.shape


def _first_difference(then: tuple[str, Any], now: tuple[str, Any]) -> str:
    names = ("class", "hooks", "attributes", "parameters", "buffers", "names of attributes", "parts")
    for name, before, after in zip(names, then[1], now[1]):
        if isinstance(before, dict) and before != after:
            return f"{name}: {next(key for key in (*before, *after) if before.get(key) != after.get(key))}"
        if before != after:
            return f"{name}: {', '.join(map(str, {*before} ^ {*after}))}" if isinstance(before, list) else name
    return "name"
