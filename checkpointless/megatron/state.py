"""The tensors of a rank's Megatron model and optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer, MixedPrecisionOptimizer
from typing_extensions import override

from checkpointless.megatron.replicas import replica_group
from checkpointless.megatron.update import gather_parameters, sub_optimizers, update_locally
from checkpointless.transfer.module_tensors import TrainingTensors


class MegatronTensors(TrainingTensors):
    """The tensors of one rank's model and optimizer; what a distributed optimizer owns is a shard.

    Args:
        chunks: the model's chunks (one, or several with virtual pipeline stages).
        optimizer: Megatron's optimizer; None: there is none yet.
    """

    def __init__(self, chunks: Iterable[torch.nn.Module], optimizer: MegatronOptimizer | None) -> None:
        self.optimizers = sub_optimizers(optimizer)
        super().__init__(chunks, [getattr(each, "optimizer", None) for each in self.optimizers])

    def group(self) -> tuple[int, ...]:
        """Return the ranks that hold the same shard."""
        return replica_group(self.optimizers)

    def scalers(self) -> list[dict[str, Any] | None]:
        """Return a copy of every optimizer's loss-scaler state; None for an optimizer without a loss scaler."""
        return [
            {name: _copy(value) for name, value in scaler.state_dict().items()}
            if (scaler := getattr(optimizer, "grad_scaler", None)) is not None
            else None
            for optimizer in self.optimizers
        ]

    @override
    def load_objects(self, objects: Mapping[str, Any]) -> None:
        """Load what :meth:`groups`, :meth:`plain_state` and :meth:`scalers` returned."""
        super().load_objects(objects)
        for optimizer, scaler in zip(self.optimizers, objects["scalers"]):
            if scaler is not None:
                optimizer.grad_scaler.load_state_dict(scaler)

    def apply_held_update(self) -> None:
        """Apply the update whose final gradients the optimizer holds."""
        with torch.no_grad():
            update_locally(self.optimizers)

    def derive(self) -> None:
        """Derive the model's parameters from the shards of all ranks. This is a collective."""
        with torch.no_grad():
            for optimizer in self.optimizers:
                if isinstance(optimizer, MixedPrecisionOptimizer) and not optimizer.is_stub_optimizer:
                    optimizer._copy_main_params_to_model_params()
            gather_parameters(self.optimizers, force=True)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
