"""Plain attributes of a trainer's parts: LightningModule, data module and callbacks, as rank-local state.

One rule says what belongs to it: numbers, text, bytes, None, tensors and arrays, enum members, and lists, tuples,
sets, dicts and deques of these. Whatever else a part keeps in attributes begins anew when the block is entered
again, and is named once.
"""

from __future__ import annotations

import enum
import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from checkpointless.recovery.own.declared import keeps_declared, put_value

#: Whose parts bring their state back by themselves, or are put back by the strategies.
_FRAMEWORKS = ("lightning", "pytorch_lightning", "nemo", "megatron", "checkpointless")
_PLAIN_OF_TORCH = (torch.Size, torch.dtype, torch.device)
_STATE = "state_dict()"
_ENUM = "__enum__"


def parts_of(trainer: pl.Trainer | None) -> Iterator[Part]:
    """Yield the parts of a trainer that users write, each with a name that it has at every entry of the block.

    Args:
        trainer: the trainer; None: it is gone.
    """
    if trainer is None:
        return
    for name, part, inherited in (
        ("module", trainer.lightning_module, _OF_MODULE),
        ("data", getattr(trainer, "datamodule", None), _OF_DATA),
    ):
        if part is not None and not _is_of_framework(type(part)):
            yield Part(name, part, inherited)
    count: Counter[str] = Counter()
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        kind = type(callback)
        if _is_of_framework(kind):
            continue
        count[kind.__qualname__] += 1
        number = count[kind.__qualname__]
        yield Part(kind.__qualname__ if number == 1 else f"{kind.__qualname__}#{number}", callback, frozenset())


def kept_states(trainer: pl.Trainer) -> set[str]:
    """Return the keys of the callbacks whose states are kept as rank-local state, so that no peer gives them."""
    keys = {part.name: part.state_key for part in parts_of(trainer)}
    return {key for name, key in keys.items() if key and keeps_declared(f"{name}.{_STATE}")}


class Part:
    """One part with attributes.

    Args:
        name: its name.
        part: the object.
        inherited: names of attributes that every object of its base class has.

    Attributes:
        name: as given.
    """

    def __init__(self, name: str, part: object, inherited: frozenset[str]) -> None:
        self.name = name
        self._part: Any = part
        self._inherited = inherited

    @property
    def state_key(self) -> str:
        """The key of a callback's state in Lightning's checkpoints; "": it has none."""
        return self._part.state_key if self._has_state() else ""

    def values(self) -> Mapping[str, Any]:
        """Return the attributes that may be state, by name, and the state of a callback that has one."""
        found = {
            name: [_ENUM, value.name] if isinstance(value, enum.Enum) else value
            for name, value in vars(self._part).items()
            if name not in self._inherited and not name.startswith("_checkpointless") and not _is_code(value)
        }
        if self._has_state():
            found[_STATE] = self._part.state_dict()
        return found

    def put(self, values: Mapping[str, Any]) -> None:
        """Put back what :meth:`values` returned."""
        values = dict(values)
        state = values.pop(_STATE, None)
        if state:
            self._part.load_state_dict(state)
        now = vars(self._part)
        for name, value in values.items():
            present = now.get(name)
            if isinstance(value, list) and len(value) == 2 and value[0] == _ENUM:
                if isinstance(present, enum.Enum):
                    setattr(self._part, name, type(present)[value[1]])
                continue
            kept = put_value(present, value)
            if kept is not present:
                setattr(self._part, name, kept)

    def _has_state(self) -> bool:
        if not isinstance(self._part, Callback):
            return False
        return type(self._part).state_dict is not Callback.state_dict or "state_dict" in vars(self._part)


def _is_of_framework(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _FRAMEWORKS


def _is_code(value: object) -> bool:
    """Return whether a value is no state: functions, classes, modules, and objects of the frameworks."""
    kind = type(value)
    if _is_of_framework(kind) or isinstance(value, torch.nn.Module | Callback | pl.LightningDataModule):
        return True
    if kind.__module__.partition(".")[0] == "torch" and not isinstance(value, (torch.Tensor, *_PLAIN_OF_TORCH)):
        return True  # optimizers, loaders, samplers, schedulers
    return inspect.isroutine(value) or inspect.isclass(value) or inspect.ismodule(value)


_HPARAMS = {"_hparams", "_hparams_initial", "_hparams_name"}
_OF_MODULE = frozenset(vars(pl.LightningModule())) | _HPARAMS
_OF_DATA = frozenset(vars(pl.LightningDataModule())) | _HPARAMS
