"""The tensors of modules and their torch optimizers, by key, in the same order on every replica."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from checkpointless.state.serialization import state_tree
from checkpointless.state.serialization.later import is_fixed
from checkpointless.state.serialization.tensor_memory import local_part
from checkpointless.transfer.rank_groups import Group
from checkpointless.transfer.sharded_tensors import is_sharded, spread_like
from checkpointless.transfer.tensor_entry import Key, TensorEntry

_SMALL_BYTES = 1 << 20  # a larger buffer is copied again only if its version has changed
#: The last word of the key of an optimizer's own (main) parameter; its other keys are torch's names of state.
PARAMETER = "parameter"


class TrainingTensors:
    """Modules and torch optimizers of one rank.

    The keys are ``("model", module, name)`` for parameters and buffers, and
    ``("optimizer", number, group, parameter, name)`` for what an optimizer owns: the parameter that it updates
    (which need not be the module's own) and its state.

    Args:
        modules: the modules.
        optimizers: the optimizers; None stands for an optimizer that has nothing to update on this rank.
    """

    def __init__(
        self, modules: Iterable[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer | None]
    ) -> None:
        self.modules = list(modules)
        self._torch_optimizers = list(optimizers)
        self._buffers = BufferCopies(self.modules)

    def group(self) -> Group:
        """Return the global ranks that hold all that this rank holds. A subclass knows them."""
        raise NotImplementedError

    def parts(self, keys: Iterable[Key]) -> Mapping[Group, Sequence[Key]]:
        """Return ``keys`` by the ranks that hold the same under them: here, all have the same holders."""
        return {self.group(): list(keys)}

    def are_reduced(self) -> bool:
        """Return True: what is one part is updated alike by all its holders."""
        return True

    def model(self) -> dict[Key, torch.Tensor]:
        """Return the parameters and buffers of the modules, by key."""
        found: dict[Key, torch.Tensor] = {}
        for index, module in enumerate(self.modules):
            for name, parameter in self.parameters_of(module):
                found["model", index, name] = local_part(parameter)
        for key, buffer in self._buffers.present():
            found[key] = local_part(buffer)
        return found

    def parameters_of(self, module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the parameters of a module that have a storage, with their names."""
        return module.named_parameters()

    def copy_buffers(self) -> Mapping[Key, torch.Tensor]:
        """Return copies, by key, of the buffers as they are now: a step changes some of them before its commit."""
        return self._buffers.take()

    def put_buffers(self, copies: Mapping[Key, torch.Tensor]) -> None:
        """Give the modules' buffers the values of ``copies``."""
        self._buffers.put(copies)

    def mark_buffers(self) -> None:
        """Note the buffers as they are now, for :meth:`written_buffers`."""
        self._buffers.mark()

    def written_buffers(self) -> list[Key]:
        """Return the keys of the buffers that were written to, or replaced, since :meth:`mark_buffers`."""
        return self._buffers.written()

    def new_buffers(self) -> list[str]:
        """Return the names of the buffers that a state dict has and that did not exist at the beginning."""
        return self._buffers.new(self.modules)

    def shard(self) -> dict[Key, torch.Tensor]:
        """Return the tensors that this rank's optimizer update owns, by key."""
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

    def essentials(self) -> dict[Key, torch.Tensor]:
        """Return the tensors from which, with those of all other ranks, the whole state can be made again."""
        return self.tensors()

    def adopt(self, tensors: Mapping[Key, torch.Tensor]) -> set[Key]:
        """Let frozen parameters and the optimizer use ``tensors`` themselves, where they lie on the right device.

        A trained parameter may lie in a buffer with others (Megatron's, DDP's), and so may a main parameter that is
        a part of it. Such tensors have to be copied, unless the model is the one that they were taken from.

        Returns:
            The keys of the tensors that are now in their place.
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
                inner.state[parameter][str(key[-1])] = spread_like(tensor, parameter)
            else:
                continue
            adopted.add(key)
        return adopted

    def room(self, entries: Sequence[TensorEntry]) -> Mapping[Key, torch.Tensor]:
        """Return storage for ``entries``; optimizer state that does not exist yet is made in its place.

        So is a buffer that has another shape, as one that grows with the longest batch (a cache of positions).
        """
        self._buffers.shape({entry.key: (entry.shape, entry.dtype) for entry in entries})
        present = {**self.model(), **self.shard()}
        owners = {key: (inner, parameter) for key, inner, parameter in self._parameters()}
        for entry in entries:
            if entry.key not in present and entry.key[:-1] in owners:
                inner, parameter = owners[entry.key[:-1]]
                on_host = entry.device == "cpu" and not entry.shape
                made = torch.empty(
                    entry.shape, dtype=entry.dtype, device=torch.device("cpu") if on_host else parameter.device
                )
                inner.state[parameter][str(entry.key[-1])] = spread_like(made, parameter)
                present[entry.key] = made
        return present

    def groups(self) -> list[list[dict[str, Any]]]:
        """Return the values of the optimizers' param groups, learning rates included."""
        return [
            [{name: value for name, value in group.items() if name != "params"} for group in _groups(optimizer)]
            for optimizer in self._torch_optimizers
        ]

    def plain_state(self) -> dict[Key, dict[str, Any]]:
        """Return the optimizers' non-tensor state, which only an update changes."""
        state = {
            key: {
                name: value
                for name, value in inner.state.get(parameter, {}).items()
                if not isinstance(value, torch.Tensor)
            }
            for key, inner, parameter in self._parameters()
        }
        return {key: plain for key, plain in state.items() if plain}

    def spread(self) -> list[Key]:
        """Return the keys of the optimizers' tensors that are DTensors, as their parameters are."""
        return [
            (*key, name)
            for key, inner, parameter in self._parameters()
            for name, value in inner.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor) and is_sharded(value)
        ]

    def unfit(self) -> str | None:
        """Return why a tensor of the state cannot be carried over to another process; None: each can be."""
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

    def load_objects(self, objects: Mapping[str, Any]) -> None:
        """Put back what :meth:`groups`, :meth:`plain_state` (as ``state``) and :meth:`spread` returned."""
        for optimizer, groups in zip(self._torch_optimizers, objects["groups"]):
            for group, values in zip(_groups(optimizer), groups):
                put_values(group, values)
        spread = {tuple(key) for key in objects.get("spread", ())}
        for key, inner, parameter in self._parameters():
            plain = objects["state"].get(key)
            if plain:
                inner.state[parameter].update(plain)
            for name, value in inner.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and is_sharded(value) and (*key, name) not in spread:
                    inner.state[parameter][name] = local_part(value)

    def join_objects(self, objects: Mapping[Group, Any]) -> dict[str, Any]:  # Any: plain data
        """Return the objects of the first part, with the optimizers' plain state from a holder of each parameter.

        Args:
            objects: by part, what :meth:`load_objects` takes.
        """
        joined: dict[str, Any] = dict(objects[min(objects)])
        joined["state"] = {}
        for group, theirs in objects.items():
            keys = {(*key, PARAMETER): key for key in theirs["state"]}
            for key in self.parts(keys).get(group, ()):
                joined["state"][keys[key]] = theirs["state"][keys[key]]
        return joined

    def _parameters(self) -> Iterator[tuple[Key, torch.optim.Optimizer, torch.Tensor]]:
        """Yield key, optimizer and parameter for every parameter that this rank updates."""
        for number, optimizer in enumerate(self._torch_optimizers):
            if optimizer is None:
                continue
            for position, group in enumerate(_groups(optimizer)):
                for index, parameter in enumerate(group["params"]):
                    yield ("optimizer", number, position, index), optimizer, parameter


class BufferCopies:
    """Takes copies of modules' buffers. A large buffer that did not change between two copies is kept once.

    Args:
        modules: the modules whose buffers are copied. The buffers that exist now are copied, even if another tensor
            takes the place of one.
    """

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
        with torch.no_grad():
            for key, owner, attribute in self._places:
                buffer = owner._buffers.get(attribute)
                if buffer is None:
                    continue
                seen, version, copy = self._last.get(key, (None, -1, buffer))
                part = local_part(buffer)
                if seen is not buffer or version != buffer._version or part.nbytes <= _SMALL_BYTES:
                    copy = part.detach().clone()
                    self._last[key] = (buffer, buffer._version, copy)
                copies[key] = copy
        return copies

    def shape(self, forms: Mapping[Key, tuple[Sequence[int], torch.dtype]]) -> None:
        """Replace the buffers that have another shape or dtype than ``forms`` say: a step may do so, too."""
        for key, owner, attribute in self._places:
            buffer = owner._buffers.get(attribute)
            if buffer is None or key not in forms or is_sharded(buffer):
                continue
            shape, dtype = forms[key]
            if (tuple(buffer.shape), buffer.dtype) != (tuple(shape), dtype):
                owner._buffers[attribute] = torch.empty(tuple(shape), dtype=dtype, device=buffer.device)

    def put(self, copies: Mapping[Key, torch.Tensor]) -> None:
        """Give the buffers that still exist the values of ``copies``, and their shapes."""
        self.shape({key: (tuple(copy.shape), copy.dtype) for key, copy in copies.items()})
        with torch.no_grad():
            for key, owner, attribute in self._places:
                buffer = owner._buffers.get(attribute)
                if buffer is not None and key in copies:
                    local_part(buffer).copy_(copies[key])


def _groups(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
    """Return the param groups of an optimizer; none if there is no optimizer."""
    return [] if optimizer is None else list(optimizer.param_groups)


def put_values(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Give a param group ``values``, which stay as they are whatever is changed in the group.

    A tensor takes over the number and stays where it is: a captured graph, for example, may refer to it.
    """
    for name, value in values.items():
        present = group.get(name)
        if isinstance(value, torch.Tensor) and isinstance(present, torch.Tensor) and present.shape == value.shape:
            present.detach().copy_(value)
        else:
            group[name] = value if is_fixed(value) else state_tree.copy(value)


def _version_of(buffer: torch.Tensor) -> int:
    """Return how often ``buffer`` was written to, as torch counts it; it does not for inference tensors."""
    return 0 if buffer.is_inference() else buffer._version


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_the_same(tensor: torch.Tensor, present: torch.Tensor) -> bool:
    """Return whether ``tensor`` is where ``present`` is."""
    return tensor.numel() > 0 and tensor.data_ptr() == present.data_ptr() and _alike(tensor, present)


def _alike(tensor: torch.Tensor, present: torch.Tensor) -> bool:
    """Return whether ``tensor`` can take the place of ``present``."""
    return (tensor.dtype, tensor.shape, tensor.device, tensor.stride()) == (
        present.dtype,
        present.shape,
        present.device,
        present.stride(),
    )
