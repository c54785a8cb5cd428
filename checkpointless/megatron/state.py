"""The tensors of a rank's Megatron model and optimizer, by key, in one order on every replica."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

from checkpointless.megatron.replicas import replica_group
from checkpointless.megatron.update import gather_parameters, sub_optimizers, update_locally
from checkpointless.recovery.transfer import Key, TensorEntry

_PARAMETER = "parameter"  # the optimizer's own (main) parameter; its other keys are torch's state names


class MegatronTensors:
    """Model and optimizer of one rank.

    Keys: ``("model", chunk, name)`` for parameters and buffers; ``("optimizer", number, group, parameter, name)``
    for what the optimizer owns: the parameter that it updates (a shard, with the distributed optimizer) and its
    state.

    Args:
        chunks: the model's chunks (one, or several with virtual pipeline stages).
        optimizer: Megatron's optimizer.
    """

    def __init__(self, chunks: Iterable[torch.nn.Module], optimizer: Any) -> None:
        self.chunks = list(chunks)
        self.optimizers = sub_optimizers(optimizer)

    def group(self) -> tuple[int, ...]:
        """The ranks that hold the same shard."""
        return replica_group(self.optimizers)

    def model(self) -> dict[Key, torch.Tensor]:
        """Parameters and buffers."""
        found: dict[Key, torch.Tensor] = {}
        for index, chunk in enumerate(self.chunks):
            for name, parameter in chunk.named_parameters():
                found["model", index, name] = parameter.data
            for name, buffer in chunk.named_buffers():
                found["model", index, name] = buffer
        return found

    def shard(self) -> dict[Key, torch.Tensor]:
        """What the optimizer update of this rank owns."""
        found: dict[Key, torch.Tensor] = {}
        for key, inner, parameter in self._parameters():
            found[(*key, _PARAMETER)] = parameter.data
            for name, value in sorted(inner.state.get(parameter, {}).items()):
                if isinstance(value, torch.Tensor):
                    found[(*key, name)] = value
        return found

    def tensors(self) -> dict[Key, torch.Tensor]:
        """Model and shard. A main parameter that lies in the model's own storage is not listed twice."""
        model = self.model()
        storages = {tensor.untyped_storage().data_ptr() for tensor in model.values()}
        shard = {
            key: tensor
            for key, tensor in self.shard().items()
            if key[-1] != _PARAMETER or tensor.untyped_storage().data_ptr() not in storages
        }
        return {**model, **shard}

    def room(self, entries: Sequence[TensorEntry]) -> Mapping[Key, torch.Tensor]:
        """Storage for ``entries``; optimizer state that does not exist yet is made in its place."""
        present = {**self.model(), **self.shard()}
        owners = {key: (inner, parameter) for key, inner, parameter in self._parameters()}
        for entry in entries:
            if entry.key not in present and entry.key[:-1] in owners:
                inner, parameter = owners[entry.key[:-1]]
                device = parameter.device if entry.device != "cpu" else torch.device("cpu")
                made = torch.empty(entry.shape, dtype=entry.dtype, device=device)
                inner.state[parameter][str(entry.key[-1])] = made
                present[entry.key] = made
        return present

    def objects(self) -> dict[str, Any]:
        """The optimizer's plain values: param groups, and state that is no tensor; the loss scaler."""
        groups = [
            [{name: value for name, value in group.items() if name != "params"} for group in _groups(optimizer)]
            for optimizer in self.optimizers
        ]
        state = {
            key: {name: value for name, value in inner.state.get(parameter, {}).items() if not _is_tensor(value)}
            for key, inner, parameter in self._parameters()
        }
        scalers = [
            scaler.state_dict() if (scaler := getattr(optimizer, "grad_scaler", None)) is not None else None
            for optimizer in self.optimizers
        ]
        return {
            "groups": groups,
            "state": {key: plain for key, plain in state.items() if plain},
            "scalers": scalers,
        }

    def load_objects(self, objects: Mapping[str, Any]) -> None:
        """Put back what :meth:`objects` gave."""
        for optimizer, groups, scaler in zip(self.optimizers, objects["groups"], objects["scalers"]):
            for group, values in zip(_groups(optimizer), groups):
                group.update(values)
            if scaler is not None:
                optimizer.grad_scaler.load_state_dict(scaler)
        for key, inner, parameter in self._parameters():
            plain = objects["state"].get(key)
            if plain:
                inner.state[parameter].update(plain)

    def apply_held_update(self) -> None:
        """Apply the update whose final gradients the optimizer holds."""
        with torch.no_grad():
            update_locally(self.optimizers)

    def settle(self) -> None:
        """Derive the model's parameters from the shards of all ranks. Collective."""
        with torch.no_grad():
            for optimizer in self.optimizers:
                if isinstance(optimizer, MixedPrecisionOptimizer) and not optimizer.is_stub_optimizer:
                    optimizer._copy_main_params_to_model_params()
            gather_parameters(self.optimizers, force=True)

    def _parameters(self) -> Iterator[tuple[Key, Any, torch.nn.Parameter]]:
        """Key, inner torch optimizer and parameter, of every parameter that this rank updates."""
        for number, optimizer in enumerate(self.optimizers):
            for position, group in enumerate(_groups(optimizer)):
                for index, parameter in enumerate(group["params"]):
                    yield ("optimizer", number, position, index), optimizer.optimizer, parameter


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    """The param groups of a Megatron optimizer; none if this rank has nothing to update."""
    inner = getattr(optimizer, "optimizer", None)
    return [] if inner is None else list(inner.param_groups)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
