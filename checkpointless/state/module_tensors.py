"""The tensors of modules and their torch optimizers, by key, in the same order on every replica."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch.nn.parallel import DistributedDataParallel

from checkpointless.state.port import PARAMETER, TrainingState
from checkpointless.state.serialization import state_tree
from checkpointless.state.serialization.state_tree import copy_of, is_fixed
from checkpointless.state.serialization.tensor_memory import local_part
from checkpointless.transfer.tensor_entry import Key, TensorEntry

# --- DTensors: which ranks hold the same part of a parameter, and how a part becomes a DTensor again --------------


def is_sharded(tensor: object) -> bool:
    """Return whether ``tensor`` is a DTensor, which this rank may hold a part of only."""
    return hasattr(tensor, "to_local")


def _spread_like(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return ``part``, as a DTensor if the parameter is one; a number, or one of another shape, stays as it is."""
    if not is_sharded(parameter) or part.shape != local_part(parameter).shape:
        return part
    like: Any = parameter
    return type(like).from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


_SMALL_BYTES = 1 << 20  # a larger buffer is copied again only if its version has changed


class BufferCopies:
    """Copies of the buffers that exist at the beginning; a large one is kept once as long as it does not change."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        modules = list(modules)
        self._places: list[tuple[Key, torch.nn.Module, str]] = []
        self._at_first = {  # shared ones in all their places
            (id(part), attribute)
            for module in modules
            for part in module.modules()
            for attribute, buffer in part._buffers.items()
            if buffer is not None
        }
        for index, module in enumerate(modules):
            owners = dict(module.named_modules(remove_duplicate=False))
            for name, _ in module.named_buffers():
                owner, _, attribute = name.rpartition(".")
                self._places.append((("model", index, name), owners[owner], attribute))
        self._last: dict[Key, tuple[torch.Tensor, int, torch.Tensor]] = {}  # the buffer, its version, its copy
        self._marks: list[tuple[torch.Tensor, int]] = []  # each buffer that is present, and its version

    def present(self) -> Iterator[tuple[Key, torch.Tensor]]:
        """Yield the buffers, by key, of those that existed at the beginning."""
        for key, owner, attribute in self._places:
            buffer = owner._buffers.get(attribute)
            if buffer is not None:
                yield key, buffer

    def mark(self) -> None:
        """Note the buffers as they are now."""
        self._marks = [(buffer, _version_of(buffer)) for _, buffer in self.present()]

    def written(self) -> list[Key]:
        """Return the keys of the buffers that are other tensors, or were written to, since :meth:`mark`."""
        return [
            key
            for (key, buffer), (seen, version) in zip(self.present(), self._marks)
            if buffer is not seen or _version_of(buffer) != version
        ]

    def new(self, modules: Iterable[torch.nn.Module]) -> list[str]:
        """Return the names of the buffers of ``modules`` that are saved and did not exist at the beginning."""
        return [
            f"{name}.{attribute}".lstrip(".")
            for module in modules
            for name, part in module.named_modules()
            for attribute, buffer in part._buffers.items()
            if buffer is not None
            and (id(part), attribute) not in self._at_first
            and attribute not in part._non_persistent_buffers_set
        ]

    def take(self) -> Mapping[Key, torch.Tensor]:
        """Return copies of all buffers, in the order of the modules."""
        copies: dict[Key, torch.Tensor] = {}
        if not self._places:
            return copies
        with torch.no_grad():
            for key, buffer in self.present():
                seen, version, copy = self._last.get(key, (None, -1, buffer))
                part = local_part(buffer)
                now = _version_of(buffer)
                if seen is not buffer or version != now or buffer.is_inference() or part.nbytes <= _SMALL_BYTES:
                    copy = part.detach().clone()
                    self._last[key] = (buffer, now, copy)
                copies[key] = copy
        return copies

    def shape(self, forms: Mapping[Key, tuple[Sequence[int], torch.dtype]]) -> None:
        """Replace buffers of another shape or dtype than ``forms``, or of torch's inference mode."""
        for key, owner, attribute in self._places:
            buffer = owner._buffers.get(attribute)
            if buffer is None or key not in forms or is_sharded(buffer):
                continue
            shape, dtype = forms[key]
            if (tuple(buffer.shape), buffer.dtype) != (tuple(shape), dtype) or buffer.is_inference():
                owner._buffers[attribute] = torch.empty(tuple(shape), dtype=dtype, device=buffer.device)

    def put(self, copies: Mapping[Key, torch.Tensor]) -> None:
        """Give the buffers that still exist the values of ``copies``, and their shapes."""
        self.shape({key: (tuple(copy.shape), copy.dtype) for key, copy in copies.items()})
        with torch.no_grad():
            for key, buffer in self.present():
                if key in copies:
                    local_part(buffer).copy_(copies[key])


def _version_of(buffer: torch.Tensor) -> int:
    """Return how often ``buffer`` was written to, as torch counts it; it does not for inference tensors."""
    return 0 if buffer.is_inference() else buffer._version


_MORE_PARAMETERS = (
    "an optimizer has other parameters than at the beginning (add_param_group), which no rank that is made anew "
    "has: give it all of them at the beginning, and train some of them later by their requires_grad"
)


class _ParamGroups:
    """Takes the values of all param groups of some optimizers, and finds the parameters."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer | None]) -> None:
        self._optimizers = list(optimizers)
        # By the lists in the groups: those lists, which keep their ids, and the parameters in them.
        self._listed: tuple[list[int], list[Any], list[torch.Tensor]] = ([], [], [])

    def take(self) -> Callable[[], list[list[dict[str, Any]]]]:
        """Take the values now, copied if they change in place; return what makes them, by optimizer and group."""
        taken = [
            [
                {
                    name: value if is_fixed(value) else copy_of(value)
                    for name, value in group.items()
                    if name != "params"
                }
                for group in _groups(each)
            ]
            for each in self._optimizers
        ]
        return lambda: [
            [{name: value() if callable(value) else value for name, value in group.items()} for group in groups]
            for groups in taken
        ]

    def parameters(self) -> list[torch.Tensor]:
        lists = [group["params"] for each in self._optimizers if each is not None for group in each.param_groups]
        now = [*map(id, lists), *map(len, lists)]
        if now != self._listed[0]:
            self._listed = now, lists, [parameter for each in lists for parameter in each]
        return self._listed[2]


def _sizes_of(optimizers: Iterable[torch.optim.Optimizer | None]) -> list[int]:
    return [len(group["params"]) for each in optimizers if each is not None for group in each.param_groups]


_training = operator.attrgetter("training")
_requires_grad = operator.attrgetter("requires_grad")
#: Of a DistributedDataParallel: whether its next forward pass gives all ranks the buffers of the first one. It does
#: not after a pass without gradients, such as that of a validation.
_syncs = operator.attrgetter("require_forward_param_sync")


#: How the state is read and put back that an optimizer has outside ``optimizer.state[parameter]``.
_OwnState: TypeAlias = tuple[Callable[[Any], Any], Callable[[Any, Any], None]]
_OWN_STATES: dict[type, _OwnState] = {}


def register_optimizer_state(kind: type, get: Callable[[Any], Any], put: Callable[[Any, Any], None]) -> None:
    """Declare the state that a class of optimizers keeps outside its param groups and ``state[parameter]``.

    It is copied at every step boundary and comes from a replica where a process is replaced, so it should be small.
    Register the class before the training begins.

    Args:
        kind: the class; its subclasses are included, unless they are registered as well.
        get: returns the state of an optimizer as plain data (numbers, text, tensors, lists, dicts of these).
        put: gives an optimizer what ``get`` returned, as a copy of its own.
    """
    _OWN_STATES[kind] = get, put


def own_state_of(optimizer: object) -> _OwnState | None:
    """Return how the registered state of an optimizer is read and put back; None: its class is not registered."""
    return next((_OWN_STATES[each] for each in type(optimizer).__mro__ if each in _OWN_STATES), None)


class TrainingTensors(TrainingState):
    """Modules and torch optimizers of one rank; a subclass knows its replicas, and how its update is finished.

    The keys are ``("model", module, name)`` for parameters and buffers, and
    ``("optimizer", number, group, parameter, name)`` for what an optimizer owns: the parameter that it updates
    (which need not be the module's own) and its state.

    Args:
        optimizers: the optimizers; None stands for an optimizer that has nothing to update on this rank.
    """

    def __init__(
        self, modules: Iterable[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer | None]
    ) -> None:
        self.modules = list(modules)
        self.buffers = BufferCopies(self.modules)
        self._torch_optimizers = list(optimizers)
        self._groups = _ParamGroups(self._torch_optimizers)
        self._sizes = _sizes_of(self._torch_optimizers)
        self._all_modules = [part for module in self.modules for part in module.modules()]
        self.wrappers = [part for part in self._all_modules if isinstance(part, DistributedDataParallel)]
        # As they are now: while FSDP2 computes, whole parameters are in the places of the divided ones.
        self._all_parameters = [each for module in self.modules for each in module.parameters()]

    def model(self) -> dict[Key, torch.Tensor]:
        """Return the parameters and buffers of the modules, by key."""
        found: dict[Key, torch.Tensor] = {}
        for index, module in enumerate(self.modules):
            for name, parameter in self.parameters_of(module):
                found["model", index, name] = local_part(parameter)
        for key, buffer in self.buffers.present():
            found[key] = local_part(buffer)
        return found

    def parameters_of(self, module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the parameters of a module that have a storage, with their names."""
        return module.named_parameters()

    def shard(self) -> dict[Key, torch.Tensor]:
        found: dict[Key, torch.Tensor] = {}
        for key, inner, parameter in self._parameters():
            found[(*key, PARAMETER)] = local_part(parameter)
            for name, value in sorted(inner.state.get(parameter, {}).items()):
                if isinstance(value, torch.Tensor):
                    found[(*key, name)] = local_part(value)
        return found

    def tensors(self) -> dict[Key, torch.Tensor]:
        """Return model and shard. A main parameter that lies in the model's own storage is not listed twice."""
        model = self.model()
        storages = {_storage(tensor) for tensor in model.values()}
        shard = {
            key: tensor
            for key, tensor in self.shard().items()
            if key[-1] != PARAMETER or _storage(tensor) not in storages
        }
        return {**model, **shard}

    def _adopt(self, tensors: Mapping[Key, torch.Tensor]) -> set[Key]:
        """Let frozen parameters and the optimizer use ``tensors`` themselves; return the keys of those.

        A trained parameter, or a main one in it, may lie in a buffer with others (Megatron's, DDP's): it is copied,
        unless the model is the one that it was taken from.
        """
        adopted: set[Key] = set()
        frozen = {
            ("model", index, name): parameter
            for index, module in enumerate(self.modules)
            for name, parameter in self.parameters_of(module)
            if not parameter.requires_grad and not is_sharded(parameter)
        }
        trained = {
            _storage(local_part(parameter))
            for module in self.modules
            for _, parameter in self.parameters_of(module)
            if parameter.requires_grad
        }
        owners = {key: (inner, parameter) for key, inner, parameter in self._parameters()}
        present = {**self.model(), **self.shard()}
        for key, tensor in tensors.items():
            if key in present and _is_the_same(tensor, present[key]):
                pass
            elif key in frozen and _alike(tensor, frozen[key].data):
                frozen[key].data = tensor
            elif key[:-1] in owners and key[-1] == PARAMETER:
                parameter = owners[key[:-1]][1]
                part = local_part(parameter)
                if is_sharded(parameter) or not _alike(tensor, part) or _storage(part) in trained:
                    continue
                parameter.data = tensor
            elif key[:-1] in owners:
                inner, parameter = owners[key[:-1]]
                there = inner.state[parameter].get(str(key[-1])) is not None
                if (tensor.dim() and tensor.device != parameter.device) or there:
                    continue
                inner.state[parameter][str(key[-1])] = _spread_like(tensor, parameter)
            else:
                continue
            adopted.add(key)
        return adopted

    def allocate(
        self, entries: Sequence[TensorEntry], held: Mapping[Key, torch.Tensor] = MappingProxyType({})
    ) -> Mapping[Key, torch.Tensor]:
        """Return storage for ``entries``; optimizer state that does not exist yet is made in its place.

        So is a buffer that has another shape, as one that grows with the longest batch (a cache of positions).
        """
        adopted = self._adopt(held) if held else set()
        self.buffers.shape({each.key: (each.shape, each.dtype) for each in entries if each.key not in adopted})
        present = {**self.model(), **self.shard()}
        owners = {key: (inner, parameter) for key, inner, parameter in self._parameters()}
        for entry in entries:
            if entry.key not in present and entry.key[:-1] in owners:
                inner, parameter = owners[entry.key[:-1]]
                on_host = entry.device == "cpu" and not entry.shape
                made = torch.empty(
                    entry.shape, dtype=entry.dtype, device=torch.device("cpu") if on_host else parameter.device
                )
                inner.state[parameter][str(entry.key[-1])] = _spread_like(made, parameter)
                present[entry.key] = made
        return {**present, **{key: held[key] for key in adopted}}

    def capture(self) -> Callable[[], dict[str, Any]]:
        """Capture param groups, which modules train, which parameters are trained, and what DDP does next."""
        groups, modes = self._groups.take(), list(map(_training, self._all_modules))
        trained, syncs = list(map(_requires_grad, self._all_parameters)), list(map(_syncs, self.wrappers))
        own = {
            number: state_tree.copy(each[0](optimizer))
            for number, optimizer in enumerate(self._torch_optimizers)
            if (each := own_state_of(optimizer)) is not None
        }
        return lambda: {
            "groups": groups(),
            "own": own,
            "modes": modes,
            "trained": trained,
            "syncs": syncs,
            "state": self._plain_state(),
            "spread": self._spread(),
        }

    def _plain_state(self) -> dict[Key, dict[str, Any]]:
        """Return the optimizers' non-tensor state, which only an update changes."""
        found: dict[Key, dict[str, Any]] = defaultdict(dict)
        for key, name, value in self._kept():
            if not isinstance(value, torch.Tensor):
                found[key][name] = value
        return dict(found)

    def _spread(self) -> list[Key]:
        """Return the keys of the optimizers' tensors that are DTensors, as their parameters are."""
        return [(*key, name) for key, name, value in self._kept() if is_sharded(value)]

    def _kept(self) -> Iterator[tuple[Key, str, Any]]:
        for key, inner, parameter in self._parameters():
            for name, value in inner.state.get(parameter, {}).items():
                yield key, name, value

    def unfit(self) -> str | None:
        """Return why a tensor of the state cannot be carried over to another process; None: each can be."""
        for optimizer in self._torch_optimizers:
            own = own_state_of(optimizer)
            try:
                state_tree.check(own[0](optimizer) if own is not None else None)
            except state_tree.StateTreeError as error:
                return f"what is registered as the state of {type(optimizer).__name__} cannot travel ({error})"
        for key, inner, parameter in self._parameters():
            part = local_part(parameter)
            held = [("parameter", parameter), *inner.state.get(parameter, {}).items()]
            for name, value in held:
                if not isinstance(value, torch.Tensor):
                    continue
                if type(local_part(value)) not in (torch.Tensor, torch.nn.Parameter):
                    return f"{name} of parameter {key[-1]} is a {type(local_part(value)).__name__}, no plain tensor"
                if is_sharded(value) and local_part(value).shape != part.shape:
                    return (
                        f"{name} of parameter {key[-1]} is a DTensor that is divided otherwise than the parameter"
                    )
        return None

    def restore(self, captured: Mapping[str, Any]) -> None:
        """Put back what :meth:`capture` returned, or a part of it."""
        for optimizer, groups in zip(self._torch_optimizers, captured.get("groups", ())):
            for group, values in zip(_groups(optimizer), groups):
                _put_values(group, values)
        for key, inner, parameter in self._parameters() if "state" in captured else ():
            plain = captured["state"].get(key)
            if plain:
                inner.state[parameter].update(plain)
        for number, value in captured.get("own", {}).items():
            own = own_state_of(self._torch_optimizers[number])
            if own is not None:
                own[1](self._torch_optimizers[number], state_tree.copy(value))
        spread = {tuple(key) for key in captured.get("spread", ())}
        for key, inner, parameter in self._parameters() if "spread" in captured else ():
            for name, value in inner.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and is_sharded(value) and (*key, name) not in spread:
                    inner.state[parameter][name] = local_part(value)
        modes, trained = captured.get("modes", ()), captured.get("trained", ())
        for part, mode in zip(self._all_modules, modes) if len(modes) == len(self._all_modules) else ():
            part.training = mode
        for wrapper, syncs in zip(self.wrappers, captured.get("syncs", ())):
            wrapper.require_forward_param_sync = syncs
        fits = len(trained) == len(self._all_parameters)
        for each, is_trained in zip(self._all_parameters, trained) if fits else ():
            if each.requires_grad != is_trained:
                each.requires_grad_(is_trained)

    def rates(self) -> list[float]:
        """Return the learning rate of each param group."""
        groups = [group for optimizer in self._torch_optimizers for group in _groups(optimizer)]
        return [float(group.get("lr", 0.0)) for group in groups]

    def weights(self) -> Iterable[torch.Tensor]:
        return self._groups.parameters()

    def grown(self) -> str:
        return _MORE_PARAMETERS if _sizes_of(self._torch_optimizers) != self._sizes else ""

    def _parameters(self) -> Iterator[tuple[Key, torch.optim.Optimizer, torch.Tensor]]:
        for number, optimizer in enumerate(self._torch_optimizers):
            if optimizer is None:
                continue
            for position, group in enumerate(_groups(optimizer)):
                for index, parameter in enumerate(group["params"]):
                    yield ("optimizer", number, position, index), optimizer, parameter


def _groups(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
    return [] if optimizer is None else list(optimizer.param_groups)


def _put_values(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Give a param group ``values``. A tensor in it stays where it is: a captured graph may refer to it."""
    for name, value in values.items():
        present = group.get(name)
        if isinstance(value, torch.Tensor) and isinstance(present, torch.Tensor) and present.shape == value.shape:
            present.detach().copy_(value)
        else:
            group[name] = value if is_fixed(value) else state_tree.copy(value)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_the_same(tensor: torch.Tensor, present: torch.Tensor) -> bool:
    return tensor.numel() > 0 and tensor.data_ptr() == present.data_ptr() and _alike(tensor, present)


def _alike(tensor: torch.Tensor, present: torch.Tensor) -> bool:
    mine, theirs = ((each.dtype, each.shape, each.device, each.stride()) for each in (tensor, present))
    return mine == theirs
