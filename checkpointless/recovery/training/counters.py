"""What steps change and no recovery brings back: numbers in attributes, parameters that no optimizer updates.

What updates own is here, too, if something else changes it.
"""

from __future__ import annotations

import logging
import numbers
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from checkpointless.inprocess import UnrecoverableError
from checkpointless.recovery.training.param_groups import version_of
from checkpointless.serialization.checksum import MemoryChecksumManager
from checkpointless.serialization.samples import samples
from checkpointless.serialization.tensor_memory import local_part
from checkpointless.transfer.sharded_tensors import is_sharded
from checkpointless.transfer.tensor_entry import Key

_DEEPEST = 4  # containers within containers
_SMALL = 1024  # elements of a tensor, or of a container, that is looked at
_OPTIMIZERS = {"state", "param_groups", "defaults"}  # attributes of torch's that are kept, or do not change
_MODULES = {"_parameters", "_buffers", "_modules", "training"}
_BETWEEN = (
    "{} is changed between two calls of steps(), which is done again after a fault, to newer values: change it at "
    "the beginning of a step, before its update(), or within the update (the optimizer's register_step_post_hook)"
)
_KEEPS_ITS_OWN = ("get_extra_state", "state_dict")
_warned: set[str] = set()  # once in a process
logger = logging.getLogger(__name__)


class Followers:
    """Parameters that no optimizer updates, such as a teacher's that follow those of a student.

    Args:
        parameters: the parameters, with their names.
    """

    def __init__(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._parameters = [(name, each) for name, each in parameters if not is_sharded(each)]
        self.note()

    def note(self) -> None:
        """Note the parameters as they are now."""
        self._noted = self._now()

    def changed(self) -> str:
        """Return the name of a parameter that is another one since :meth:`note`; "" if none is.

        What is written through ``parameter.data`` is noticed by a few of its elements.
        """
        return next((name for (name, *then), (_, *now) in zip(self._noted, self._now()) if then != now), "")

    def _now(self) -> list[tuple[str, int, bytes]]:
        taken = samples(dict(enumerate(each for _, each in self._parameters)))
        return [(name, version_of(each), taken.get(at, b"")) for at, (name, each) in enumerate(self._parameters)]


class Owned:
    """What updates own: the parameters that they change, and the optimizers' state.

    Args:
        tensors: returns it, by key.
        take: returns what is compared of tensors, by key. Default: digests of all bytes.
    """

    def __init__(
        self,
        tensors: Callable[[], Mapping[Key, torch.Tensor]],
        take: Callable[[dict[Key, torch.Tensor]], Mapping[Key, object]] | None = None,
    ) -> None:
        self._tensors = tensors
        self._take = MemoryChecksumManager().digest_each if take is None else take
        self._noted: Mapping[Key, object] = {}

    def note(self) -> None:
        """Note it as it is now."""
        self._noted = self._now()

    def forget(self) -> None:
        """Compare nothing until it is noted again."""
        self._noted = {}

    def require_unchanged(self, title: Callable[[Key], str]) -> None:
        """Refuse that between two calls of ``steps()`` something has changed since :meth:`note`.

        Args:
            title: returns what the tensor of a key is, for people.

        Raises:
            UnrecoverableError: it has.
        """
        key = self.changed()
        if key is not None:
            raise UnrecoverableError(_BETWEEN.format(title(key)))

    def changed(self) -> Key | None:
        """Return the key of a tensor that is gone or is not as it was noted; None: there is none."""
        now = self._now()
        return next((key for key, noted in self._noted.items() if key not in now or now[key] != noted), None)

    def _now(self) -> Mapping[Key, object]:
        return self._take({key: each.detach() for key, each in self._tensors().items()})


@contextmanager
def put_back(weights: Callable[[], Iterable[torch.Tensor]], when_back: Callable[[], None]) -> Iterator[None]:
    """Require that parameters are at the end, also on the way of an exception, what they were at the beginning.

    Args:
        weights: returns the parameters, each time in the same order.
        when_back: is called when they are.

    Raises:
        UnrecoverableError: the context is left in the usual way, and they are not.
    """
    owned = Owned(lambda: {("weight", index): local_part(each) for index, each in enumerate(weights())})
    owned.note()
    is_back = False
    try:
        yield
    finally:
        is_back = owned.changed() is None
        if is_back:
            when_back()
    if not is_back:
        raise UnrecoverableError("other weights stay behind other_weights(): what exchanges them puts them back")


class Counters:
    """The numbers in attributes of optimizers and modules, as they were when this was made.

    Flags are left out: something that is made once is made once more in a process that is new.

    Args:
        modules: the modules; those in them are looked at, too, unless they are torch's own or say themselves what
            belongs to their state.
        optimizers: the optimizers.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._modules = {
            name or type(part).__name__: part
            for module in modules
            for name, part in module.named_modules()
            if not _is_of_torch(type(part)) and not _keeps_its_own(type(part))
        }
        self._before = self._taken()

    def counted(self) -> tuple[str, str]:
        """Return what is another number now: an attribute of an optimizer, and one of a module; "" if none is."""
        now = self._taken()
        optimizers, modules = (
            next((name for name, value in after.items() if name in before and before[name] != value), "")
            for before, after in zip(self._before, now)
        )
        return optimizers, modules

    def _taken(self) -> tuple[dict[str, Any], dict[str, Any]]:
        optimizers = {
            f"{type(each).__name__}.{name}": value
            for each in self._optimizers
            for name, value in _numbers_in(_attributes(each), _OPTIMIZERS)
        }
        modules = {
            f"{place}.{name}": value
            for place, part in self._modules.items()
            for name, value in _numbers_in(_attributes(part), _MODULES)
        }
        return optimizers, modules


def _is_of_torch(kind: type) -> bool:
    """Return whether a class, and what it inherits from, is torch's or Python's."""
    return all(each.__module__.partition(".")[0] in ("torch", "builtins", "abc", "typing") for each in kind.__mro__)


def _keeps_its_own(kind: type) -> bool:
    saves = getattr(kind, "on_save_checkpoint", None)  # Lightning's
    if saves is not None and saves.__module__.partition(".")[0] not in ("lightning", "pytorch_lightning"):
        return True
    return any(getattr(kind, name) is not getattr(torch.nn.Module, name) for name in _KEEPS_ITS_OWN)


def _attributes(value: object) -> dict[str, object]:
    """Return the attributes of an object, with the first values that its classes give to some."""
    kinds = [kind for kind in reversed(type(value).__mro__) if not _is_of_torch(kind)]
    of_classes = {name: each for kind in kinds for name, each in vars(kind).items() if type(each) in (int, float)}
    return {**of_classes, **vars(value)}


def _numbers_in(
    values: Mapping[Any, object], without: Iterable[str] = (), depth: int = 0
) -> Iterator[tuple[str, Any]]:
    """Yield the numbers in ``values`` and in containers in them, with their names."""
    for name, value in list(values.items()):
        if name in without or isinstance(value, bool):
            continue
        if isinstance(value, numbers.Number):
            yield str(name), value
        elif isinstance(value, random.Random):
            yield str(name), value.getstate()
        elif type(value) is torch.Tensor and value.numel() <= _SMALL and not value.is_meta:
            yield str(name), value.detach().flatten().tolist()
        elif depth < _DEEPEST and isinstance(value, (dict, list, tuple)) and len(value) <= _SMALL:
            inner = value if isinstance(value, dict) else dict(enumerate(value))
            for path, found in _numbers_in(inner, (), depth + 1):
                yield f"{name}.{path}", found
