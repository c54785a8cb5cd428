"""Modules and optimizers as a function of the script's has built them, and how they are made to look so again."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from checkpointless.inprocess import UnrecoverableError
from checkpointless.recovery.rng import RngStates
from checkpointless.recovery.training.attributes import Attributes, UnknownValueError, is_immutable
from checkpointless.recovery.training.blueprint import Blueprint
from checkpointless.recovery.training.interrupted import InterruptedUpdate
from checkpointless.recovery.training.param_groups import ParamGroups, version_of
from checkpointless.serialization.checksum import MemoryChecksumManager
from checkpointless.transfer.module_tensors import put_values
from checkpointless.transfer.sharded_tensors import is_sharded

#: Of an optimizer's attributes: what is looked at in another way, and what only its construction reads.
_APART = frozenset({"state", "param_groups", "defaults"})
_checksums = MemoryChecksumManager()
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SCHEDULERS = "_wrapped_by_lr_sched"  # the mark of the function that a scheduler puts over an optimizer's step
_MUST_RETURN = "keep(build): build has to return a module, an optimizer, or a tuple, list or dict of these, not a "

#: A tensor, how often it was written to, where it is, and its digest, for who writes through ``parameter.data``
#: is not counted. An optimizer's state has no digest.
_Mark = tuple[torch.Tensor, int, int, int | None]


class BuiltParts:
    """What a function of the script's has built, as it was right after it was built.

    Args:
        build: the function.
        returned: what it has returned.
        streams: the random streams before it was called, and after.

    Raises:
        UnrecoverableError: it has returned something else than modules and optimizers.

    Attributes:
        modules: the modules.
        optimizers: the optimizers.
        streams: the argument.
        obstacle: why the parts cannot be kept over a fault; "" if they can.
    """

    def __init__(self, build: Callable[[], object], returned: object, streams: tuple[RngStates, RngStates]) -> None:
        self._build = name_of(build)
        self._returned = returned
        self.streams = streams
        parts = list(_leaves(returned))
        self.modules = [each for each in parts if isinstance(each, torch.nn.Module)]
        self.optimizers = [each for each in parts if isinstance(each, torch.optim.Optimizer)]
        self._all_modules = [each for module in self.modules for each in module.modules()]
        self.parameters = _parameters_of(self.modules, self.optimizers)
        self.buffers = [each for module in self.modules for each in module.buffers()]
        self._modes = [(module, module.training) for module in self._all_modules]
        self._trained = [(each, each.requires_grad) for each in self.parameters]
        self._groups = ParamGroups(self.optimizers).take()
        self.obstacle = self._find_obstacle()
        self._marks: dict[int, _Mark] = {}
        self.note()

    @property
    def returned(self) -> object:
        """What the function has returned, in lists and dicts of its own."""
        return _copy(self._returned)

    def is_built_by(self, build: Callable[[], object]) -> bool:
        """Return whether ``build`` is the function that has built the parts, as an earlier entry has made it."""
        return name_of(build) == self._build

    def all(self) -> list[object]:
        """Return all modules, optimizers and parameters."""
        return [*self._all_modules, *self.optimizers, *self.parameters]

    # --- whether they are as they were built ----------------------------------------------------------------

    def _find_obstacle(self) -> str:
        for module in self._all_modules:
            kind = type(module).__name__
            if isinstance(module, torch.nn.parallel.DistributedDataParallel):
                return "build wraps a module in DistributedDataParallel, which refers to process groups"
            if is_compiled(module):
                return f"{kind} is compiled"
        for each in [*self.parameters, *self.buffers]:
            if is_sharded(each):
                return "build makes DTensors, which refer to process groups"
            if is_lazy(each) or each.is_meta:
                return "build leaves parameters without a shape or a place"
            if type(each) not in _PLAIN or each.layout is not torch.strided:
                return f"a {type(each).__name__} is no plain tensor"
        self._attributes = Attributes([*self._all_modules, *self.optimizers, *self.parameters, *self.buffers])
        try:
            self._blueprint = Blueprint(self.modules, attributes=self._attributes)
            self._built_optimizers = [_BuiltOptimizer(each, self._attributes) for each in self.optimizers]
        except UnknownValueError as error:
            return str(error)
        return ""

    def difference(self) -> str:
        """Return what is not as it was built, in a phrase; "": nothing that is not put back."""
        if self.obstacle:
            return self.obstacle
        for each in self._built_optimizers:
            different = each.difference()
            if different:
                return different
        return self._blueprint.difference(self.modules) or ""

    def note(self) -> None:
        """Note where all tensors are, and what is in them."""
        self._marks = self._marks_of(self._tensors()) if not self.obstacle else {}

    def forget_states(self) -> None:
        """Let go of the optimizers' states, which were noted, too."""
        kept = {id(each) for each in [*self.parameters, *self.buffers]}
        self._marks = {key: mark for key, mark in self._marks.items() if key in kept}

    def written(self, among: Set[int] | None = None) -> str:
        """Return the name of a tensor that was written to or has come since :meth:`note`; "" if there is none.

        Args:
            among: the identities of the tensors that are looked at; None: all.
        """
        if among is None and {id(each) for each in self._tensors()} != self._marks.keys():
            return "the optimizer's state"
        marks = [mark for key, mark in self._marks.items() if among is None or key in among]
        for tensor, version, place, _ in marks:
            if (version_of(tensor), tensor.data_ptr()) != (version, place):
                return self._name(tensor)
        now = self._marks_of(mark[0] for mark in marks)
        return next((self._name(mark[0]) for mark in marks if mark != now[id(mark[0])]), "")

    def note_those(self, tensors: Set[int]) -> None:
        """Note anew the tensors that lie at the addresses ``tensors``: they were written to with good reason."""
        self._marks |= self._marks_of(mark[0] for mark in self._marks.values() if mark[2] in tensors)

    def unwritten(self) -> Set[int]:
        """Return the addresses of the tensors that are as they were noted."""
        now = self._marks_of(mark[0] for mark in self._marks.values())
        return {mark[2] for key, mark in self._marks.items() if mark == now[key]}

    def _marks_of(self, tensors: Iterable[torch.Tensor]) -> dict[int, _Mark]:
        """Return where each of the tensors is and what is in it, by its identity."""
        found = list(tensors)
        own = {id(each) for each in [*self.parameters, *self.buffers]}
        digests = _checksums.digest_each({(id(each),): each.detach() for each in found if id(each) in own})
        return {id(each): (each, version_of(each), each.data_ptr(), digests.get((id(each),))) for each in found}

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from self.parameters
        yield from self.buffers
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                yield from (each for each in state.values() if isinstance(each, torch.Tensor))

    def _name(self, tensor: torch.Tensor) -> str:
        for module in self.modules:
            for name, each in [*module.named_parameters(), *module.named_buffers()]:
                if each is tensor:
                    return name
        return "the optimizer's state"

    # --- how they are made to look so again -----------------------------------------------------------------

    def interrupted(self) -> InterruptedUpdate:
        """Return what an update needs that is to be made again."""
        return InterruptedUpdate(self.parameters, self.optimizers)

    def restore(self) -> None:
        """Let all that the script sees be as it was built, but the numbers in parameters, buffers and states."""
        for parameter, is_trained in self._trained:
            parameter.grad = None
            parameter.requires_grad_(is_trained)
        for module, training in self._modes:
            module.training = training
        for optimizer, groups in zip(self.optimizers, self._groups()):
            for group, values in zip(optimizer.param_groups, groups):
                for name in group.keys() - values.keys() - {"params"}:
                    del group[name]
                put_values(group, values)
        for each in self._built_optimizers:
            each.restore()
        self.streams[1].restore()
        self.note()


class _BuiltOptimizer:
    """What an optimizer keeps beside its state and the values of its param groups.

    Args:
        optimizer: the optimizer.
        attributes: makes pictures.

    Raises:
        UnknownValueError: it keeps something that cannot be compared later.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, attributes: Attributes) -> None:
        self._optimizer = optimizer
        self._attributes = attributes
        self._members = self._members_now()
        self._fixed = {name: value for name, value in self._own() if is_immutable(value)}
        self._pictures = self._pictures_now()

    def difference(self) -> str:
        """Return what is not as it was, in a phrase; "": nothing that :meth:`restore` does not put back."""
        kind = type(self._optimizer).__name__
        if self._members_now() != self._members:
            return f"{kind} has other parameters than when it was built"
        try:
            now = self._pictures_now()
        except UnknownValueError as error:
            return str(error)
        for name in sorted(now.keys() | self._pictures.keys()):
            if now.get(name) != self._pictures.get(name):
                return f"{name} of {kind} is not as it was built"
        return ""

    def restore(self) -> None:
        """Put back what the optimizer's own code and schedulers change."""
        for name in [name for name, _ in self._own()]:
            if name not in self._fixed and name not in self._pictures:
                delattr(self._optimizer, name)
        vars(self._optimizer).update(self._fixed)

    def _own(self) -> Iterator[tuple[str, Any]]:
        return ((name, value) for name, value in vars(self._optimizer).items() if name not in _APART)

    def _members_now(self) -> list[list[int]]:
        return [[id(each) for each in group["params"]] for group in self._optimizer.param_groups]

    def _pictures_now(self) -> dict[str, object]:
        """Return pictures of all but private numbers and flags, and schedulers' functions, which may change."""
        found: dict[str, object] = {}
        for name, value in self._own():
            if (is_immutable(value) and name.startswith("_")) or hasattr(value, _SCHEDULERS):
                continue
            try:
                found[name] = self._attributes.picture(value)
            except UnknownValueError as error:
                raise UnknownValueError(f"{type(self._optimizer).__name__} keeps in {name} {error}") from None
        return found


def name_of(build: Callable[[], object]) -> object:
    """Return what a function has in common with the one that the same line of a script makes at another entry."""
    function = getattr(build, "func", build)  # of a partial
    function = getattr(function, "__func__", function)
    return function.__code__ if isinstance(function, types.FunctionType) else type(function)


def taken_by(build: Callable[[], object]) -> list[object]:
    """Return the modules, optimizers and parameters that a function has from where it was made."""
    found: list[object] = []
    function: Any = build
    while isinstance(function, functools.partial):
        found += [*function.args, *function.keywords.values()]
        function = function.func
    owner = getattr(function, "__self__", None)
    found += [owner, *getattr(owner, "__dict__", {}).values()]
    function = getattr(function, "__func__", function)
    for cell in getattr(function, "__closure__", None) or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not yet filled
            continue
    found += getattr(function, "__defaults__", None) or ()
    return [
        each for each in found if isinstance(each, torch.nn.Module | torch.optim.Optimizer | torch.nn.Parameter)
    ]


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a module is what ``torch.compile`` returns, or was compiled in place."""
    return "_orig_mod" in module._modules or vars(module).get("_compiled_call_impl") is not None


def _leaves(returned: object) -> Iterator[object]:
    if isinstance(returned, torch.nn.Module | torch.optim.Optimizer):
        yield returned
    elif isinstance(returned, dict):
        for each in returned.values():
            yield from _leaves(each)
    elif isinstance(returned, tuple | list):
        for each in returned:
            yield from _leaves(each)
    else:
        raise UnrecoverableError(f"{_MUST_RETURN}{type(returned).__name__}")


def _copy(returned: object) -> object:
    """Return ``returned`` with lists and dicts that the script may change."""
    if isinstance(returned, dict):
        return {name: _copy(each) for name, each in returned.items()}
    if isinstance(returned, list):
        return [_copy(each) for each in returned]
    if type(returned) is tuple:
        return tuple(_copy(each) for each in returned)
    return returned


def _parameters_of(modules: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer]) -> list[torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    for module in modules:
        found |= {id(each): each for each in module.parameters()}
    for optimizer in optimizers:
        found |= {id(each): each for group in optimizer.param_groups for each in group["params"]}
    return list(found.values())
