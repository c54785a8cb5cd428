"""Gives a data module back what its ``setup`` had built before the fault, where that is sure to be the same."""

from __future__ import annotations

import gc
import time
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import Dataset, IterableDataset

from checkpointless.inprocess import HPCallWrapper
from checkpointless.inprocess.context import tell
from checkpointless.recovery.rng import RngStates
from checkpointless.serialization.pictures import differing, picture, pictures
from checkpointless.telemetry.event_names import EventName
from checkpointless.transfer.exchange import true_on_all

#: What of a trainer decides how much data is built.
_SIZES = (
    "max_steps",
    "max_epochs",
    "val_check_interval",
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "world_size",
    "num_nodes",
)
_PLAIN = (bool, int, float, str, bytes, type(None))
#: Of a module: what is looked at in another way, and what leads to the trainer.
_APART = frozenset({"_parameters", "_buffers", "_modules", "_trainer", "_fabric"})
#: What leads to everything, or to nothing.
_CLOSED = (*_PLAIN, type, types.ModuleType, types.BuiltinFunctionType, types.CodeType)
_MOST_OBJECTS = 3_000_000  # a second or two, and a quarter of a gigabyte while they are looked at
_AT_ONCE = 1_000


@dataclass(frozen=True)
class _Built:
    """What a call of ``setup`` found, and what it has built.

    Attributes:
        found: pictures of the data module's attributes and of the trainer's sizes before.
        streams: the random streams before.
        built: the attributes that are new or other ones after.
        left: the random streams after.
    """

    found: Mapping[str, object]
    streams: RngStates
    built: Mapping[str, Any]
    left: RngStates


@dataclass
class _Kept:
    """What the calls of ``setup`` in one block have built, in the order of the calls."""

    generation: int = -1
    calls: int = 0  # in that generation
    built: dict[int, _Built | str] = field(default_factory=dict)  # or why a call has left nothing

    def next_call(self, generation: int) -> int:
        """Return the number of the next call in ``generation``."""
        if generation != self.generation:
            self.generation, self.calls = generation, 0
        self.calls += 1
        return self.calls


_kept: weakref.WeakKeyDictionary[HPCallWrapper, _Kept] = weakref.WeakKeyDictionary()


def keep_datasets(trainer: pl.Trainer, call: HPCallWrapper) -> None:
    """Have the next ``setup`` of the trainer's data module give back what was built before the fault.

    That is so if every rank has it, all that ``setup`` builds are map-style datasets and plain values, it tells
    nobody else of them (as one does that gives the LightningModule the weights of classes), and what it finds is as
    it was: the attributes of the data module, the sizes of the trainer, the random streams. Otherwise ``setup`` is
    called.

    Args:
        trainer: the trainer, whose process groups exist. Its data module has not been set up.
        call: the running wrapper.
    """
    module: Any = getattr(trainer, "datamodule", None)
    if module is None:
        return
    setup: Callable[[str], None] = module.setup
    kept = _kept.setdefault(call, _Kept())
    number = kept.next_call(call.generation)

    def once(stage: str) -> None:
        """Set up the data module, or give it what it had; then leave its class's own ``setup`` in place."""
        vars(module).pop("setup", None)
        began_s, streams, found = (
            time.monotonic(),
            RngStates.capture().without_sources(),
            _found(module, trainer, stage),
        )
        earlier = _agree(kept.built, number, found, streams) if call.generation > 0 else None
        if earlier is not None:
            vars(module).update(earlier.built)
            earlier.left.restore()
            tell(EventName.DATASETS, kept=True, seconds=time.monotonic() - began_s)
            return
        # Only now, for a further fault; and before anything is built in its place.
        kept.built[number] = "a fault came while its data module was set up"
        before, told = dict(vars(module)), _told(trainer)
        setup(stage)
        built = {name: value for name, value in vars(module).items() if before.get(name, before) is not value}
        changed, after = differing(told, _told(trainer)), _found(module, trainer, stage)
        in_place = [name for name in found if name not in built and after.get(name, before) != found[name]]
        reason = f"setup changes {changed}" if changed is not None else _why_not(in_place, built, trainer)
        kept.built[number] = reason or _Built(found, streams, built, RngStates.capture().without_sources())

    module.setup = once


def _found(module: pl.LightningDataModule, trainer: pl.Trainer, stage: str) -> dict[str, object]:
    """Return pictures of what decides what ``setup`` builds."""
    attributes = {
        name: value
        for name, value in vars(module).items()
        if name != "trainer" and not name.startswith("__")  # such names are frameworks' notes
    }
    sizes = {name: getattr(trainer, name, None) for name in _SIZES}
    return pictures({**attributes, **sizes, "class": type(module), "stage": str(stage)})


def _told(trainer: Any) -> dict[str, object]:
    """Return what ``setup`` may tell of the data, as pictures: the LightningModule, the callbacks, the trainer."""
    found: dict[str, object] = {}
    for name, part in trainer.lightning_module.named_modules(prefix="the LightningModule"):
        values = vars(part)
        tensors = {**values["_parameters"], **values["_buffers"], **values["_modules"]}
        own = {key: value for key, value in values.items() if key not in _APART}
        found |= {f"{name}.{key}": _told_in(value) for key, value in {**own, **tensors}.items()}
    loops = (trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop)
    for part in (trainer, *loops, *trainer.callbacks):
        found |= {f"{type(part).__name__}.{key}": each for key, each in _plain_in(part).items()}
    return found


def _told_in(value: Any) -> object:
    """Return a picture of an attribute; objects are known by their identity and the plain values in them."""
    if isinstance(value, torch.Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if isinstance(value, (*_PLAIN, list, tuple, dict, set)):
        return picture(value)
    return id(value), _plain_in(value)


def _plain_in(part: object) -> dict[str, object]:
    values = getattr(part, "__dict__", {})
    return pictures({key: value for key, value in values.items() if isinstance(value, _PLAIN)})


def _agree(
    results: Mapping[int, _Built | str], number: int, found: Mapping[str, object], streams: RngStates
) -> _Built | None:
    """Return what the call of ``number`` has built, if every rank can use its own again; None: all build anew."""
    earlier = results.get(number, "its process is new, or the fault came before its data module was set up")
    reason = earlier if isinstance(earlier, str) else _difference(earlier, found, streams)
    if true_on_all(reason is None):
        assert not isinstance(earlier, str)
        return earlier
    tell(EventName.DATASETS, kept=False, reason=reason or "another rank sets its data module up")
    return None


def _difference(earlier: _Built, found: Mapping[str, object], streams: RngStates) -> str | None:
    """Return why ``setup`` may build something else than before the fault, in a phrase; None: the same."""
    name = differing(earlier.found, found)
    if name is not None:
        return f"{name} is another one"
    return None if streams.same_streams(earlier.streams) else "random numbers were drawn otherwise before"


def _why_not(in_place: Sequence[str], built: Mapping[str, object], trainer: pl.Trainer) -> str | None:
    """Return why what ``setup`` has built cannot be used after a fault, in a phrase; None: it can.

    Args:
        in_place: the attributes that it has changed without replacing them.
        built: the attributes that are new or other ones.
        trainer: the trainer, which ends with its generation, as its model and its data module do.
    """
    if in_place:
        return f"setup changes {in_place[0]} of the data module in place"
    for name, value in built.items():
        kind = _passing(value)
        if kind is not None:
            return f"{name} of the data module has a {kind}, which is no map-style dataset and no plain value"
    owners: Any = trainer
    return leads_to(built, (owners.datamodule, trainer, trainer.lightning_module))


def _passing(value: object) -> str | None:
    """Return the class of a part of a value that training may change; None: it can be used once more."""
    seen, due = {id(value)}, [value]
    while due:
        each = due.pop()
        if isinstance(each, list | tuple | dict):
            parts = each.values() if isinstance(each, dict) else each
            inner = [part for part in parts if not isinstance(part, _PLAIN) and id(part) not in seen]
            seen.update(id(part) for part in inner)
            due += inner
        elif isinstance(each, IterableDataset) or not isinstance(each, (*_PLAIN, Dataset)):
            return type(each).__name__
    return None


def leads_to(root: object, targets: Sequence[object]) -> str | None:
    """Return which of ``targets`` can be reached from ``root``, or that there is too much to look at, in a phrase.

    Args:
        root: where to begin; classes, modules and the globals of functions are not looked into.
        targets: the objects that are looked for.

    Returns:
        A phrase; None: none of them can be reached.
    """
    wanted, seen, due = {id(each): each for each in targets}, {id(root)}, [root]
    while due:
        some = due[-_AT_ONCE:]
        del due[-_AT_ONCE:]
        for each in gc.get_referents(*some):
            if id(each) in wanted:
                return f"what setup built leads to the {type(each).__name__}"
            # What is not tracked refers to nothing that is: plain values, and tuples of such values.
            if id(each) in seen or not gc.is_tracked(each) or isinstance(each, _CLOSED):
                continue
            seen.add(id(each))
            due += _inside(each) if isinstance(each, types.FunctionType) else [each]
            if len(seen) > _MOST_OBJECTS:
                return f"what setup built has more than {_MOST_OBJECTS:,} objects"
    return None


def _inside(function: types.FunctionType) -> list[object]:
    """Return what belongs to a function alone."""
    own = (function.__closure__, function.__defaults__, function.__kwdefaults__, function.__dict__)
    return [each for each in own if each]
