"""Plain attributes of a trainer's parts: LightningModule, data module and callbacks, as rank-local state.

One rule says what belongs to it: numbers, text, bytes, None, tensors and arrays, enum members, and lists, tuples,
sets, dicts and deques of these. Whatever else a part keeps in attributes starts over when the block is entered
again, and is named once.
"""

from __future__ import annotations

import enum
import inspect
import logging
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback

from checkpointless.state.rank_local.declared import (
    ATTRIBUTES,
    declared_state,
    is_generator,
    put_object,
    put_value,
    take_object,
    tensors_in,
)

#: Whose parts bring their state back by themselves, or are put back by the strategies.
_FRAMEWORKS = ("lightning", "pytorch_lightning", "nemo", "megatron", "checkpointless")
_PLAIN_OF_TORCH = (torch.Size, torch.dtype, torch.device)
_NUMBERS = (bool, int, float, complex, str, bytes, enum.Enum, torch.Tensor, np.ndarray, np.generic)
_PLAIN = (*_NUMBERS, *_PLAIN_OF_TORCH, list, tuple, dict, set, frozenset, deque)
_STATE = "state_dict()"
_HPARAM = "hparams."
_OBJECT = ".state"  # an attribute's object stays, and gets its state back
_NO_OBJECT = (
    "%s.%s had a state before the fault, and there is no such object now: make it where the block makes %s "
    "(docs/contract.md, 2)"
)
logger = logging.getLogger(__name__)


def parts_of(trainer: pl.Trainer | None) -> Iterator[_Part]:
    """Yield the parts of a trainer that users write, each with a name that it has at every entry of the block."""
    if trainer is None:
        return
    for name, part, inherited in (
        ("module", trainer.lightning_module, _OF_MODULE),
        ("data", getattr(trainer, "datamodule", None), _OF_DATA),
    ):
        if part is not None and not _is_of_framework(type(part)):
            yield _Part(name, part, inherited, trainer)
    count: Counter[str] = Counter()
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        kind = type(callback)
        if _is_of_framework(kind):
            continue
        count[kind.__qualname__] += 1
        number = count[kind.__qualname__]
        name = kind.__qualname__ if number == 1 else f"{kind.__qualname__}#{number}"
        yield _Part(name, callback, frozenset(), trainer)


class _Part:
    def __init__(self, name: str, part: object, inherited: frozenset[str], trainer: pl.Trainer) -> None:
        self.name = name
        self._model: Any = trainer.lightning_module
        self._part: Any = part
        self._inherited = inherited

    @property
    def kept_state(self) -> str:
        """The key of a callback's state that is kept as rank-local state, so that no peer gives it; "": none is."""
        return self._part.state_key if self._has_state() and declared_state.keeps(f"{self.name}.{_STATE}") else ""

    def values(self) -> Mapping[str, Any]:
        found: dict[str, Any] = {}
        names = []
        for name, value in self._attributes():
            if is_generator(value) or isinstance(value, torch.amp.GradScaler):
                found[name + _OBJECT] = take_object(value)
            elif not self._is_code(value):
                found[name] = value
            names.append(name)
        for of_module in ("_modules", "_parameters", "_buffers"):
            names += vars(self._part).get(of_module, ())  # an attribute that became a module is no attribute
        found[ATTRIBUTES] = names  # others have been added or deleted since
        for name, value in self._hparams().items():
            if not self._is_code(value):
                found[_HPARAM + name] = value
        if self._has_state():
            found[_STATE] = self._part.state_dict()
        return found

    def put(self, values: Mapping[str, Any]) -> None:
        """Put back what :meth:`values` returned, and delete attributes that there were not."""
        values = dict(values)
        state, names = values.pop(_STATE, None), values.pop(ATTRIBUTES, None)
        if state:
            self._part.load_state_dict(state)
        now = dict(self._attributes())
        for name, value in values.items():
            if name.startswith(_HPARAM):
                key = name.removeprefix(_HPARAM)
                self._hparams()[key] = put_value(self._hparams().get(key), value)
                continue
            present = now.get(name.removesuffix(_OBJECT))
            if name.endswith(_OBJECT):
                if is_generator(present) or isinstance(present, torch.amp.GradScaler):
                    put_object(present, value)
                else:
                    logger.warning(_NO_OBJECT, self.name, name.removesuffix(_OBJECT), self.name)
                continue
            if (name in now and not _may_be_plain(present)) or self._is_of_model(present):
                continue  # what the block has made since stays
            kept = put_value(present, value)
            if kept is not present or name not in now:
                setattr(self._part, name, kept)
        for name in now.keys() - {*values, *names} if names is not None else ():
            if _may_be_plain(now[name]) and not self._is_of_model(now[name]):
                delattr(self._part, name)

    def _hparams(self) -> dict[str, Any]:
        """Return what save_hyperparameters() has kept; a hook may change it, and later steps use it."""
        kept = vars(self._part).get("_hparams")
        return kept if isinstance(kept, dict) else {}

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        given = vars(self._part)
        slots = [
            (name, getattr(self._part, name)) for name in _slots(type(self._part)) if hasattr(self._part, name)
        ]
        for name, value in [*given.items(), *slots] if slots else given.items():
            if name not in self._inherited and not name.startswith("_checkpointless"):
                yield name, value

    def _is_code(self, value: object) -> bool:
        if isinstance(value, torch.nn.Module):  # the model has its own state; another one is named
            return value is self._model or any(value is each for each in torch.nn.Module.modules(self._model))
        return _is_code(value)

    def _is_of_model(self, value: object) -> bool:
        """Return whether a value refers to memory of the model, which is put back by itself."""
        tensors = list(tensors_in(value))
        if not tensors:
            return False
        module = torch.nn.Module  # a model may use its names for something else
        owned = [*module.parameters(self._model), *module.buffers(self._model)]
        model = {_memory_of(each) for each in owned}
        return any(_memory_of(each) in model for each in tensors)

    def _has_state(self) -> bool:
        if not isinstance(self._part, Callback):
            return False
        return type(self._part).state_dict is not Callback.state_dict or "state_dict" in vars(self._part)


def _may_be_plain(value: object) -> bool:
    """Return whether a value is of a type that is put back: no function, and no object with a life of its own."""
    return value is None or isinstance(value, _PLAIN)


def _is_of_framework(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _FRAMEWORKS


def _is_code(value: object) -> bool:
    """Return whether a value is no state: functions, classes, modules, and objects of the frameworks."""
    kind = type(value)
    if _is_of_framework(kind) or isinstance(value, Callback | pl.LightningDataModule):
        return True
    if kind.__module__.partition(".")[0] == "torch" and not isinstance(value, (torch.Tensor, *_PLAIN_OF_TORCH)):
        return True  # optimizers, loaders, samplers, schedulers
    return inspect.isroutine(value) or inspect.isclass(value) or inspect.ismodule(value)


def _slots(kind: type) -> list[str]:
    named = [vars(each).get("__slots__", ()) for each in kind.__mro__]
    names = [name for each in named for name in ([each] if isinstance(each, str) else each)]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _memory_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory, or what is no address of another's."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (NotImplementedError, RuntimeError):  # of a kind that has none
        return id(tensor)


_HPARAMS = {"_hparams", "_hparams_initial", "_hparams_name"}  # the first one is put back by its items
_OF_MODULE = frozenset(vars(pl.LightningModule())) | _HPARAMS
_OF_DATA = frozenset(vars(pl.LightningDataModule())) | _HPARAMS
