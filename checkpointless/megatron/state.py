"""The tensors of a rank's Megatron model and optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from typing_extensions import override

from checkpointless.megatron.replicas import replica_group
from checkpointless.megatron.update import (
    GuardedUpdate,
    gather_parameters,
    scaler_states,
    sub_optimizers,
    update_locally,
)
from checkpointless.recovery.tensors import TrainingTensors


class MegatronTensors(TrainingTensors):
    """Model and optimizer of one rank; what an optimizer owns is a shard, with the distributed optimizer.

    Args:
        chunks: the model's chunks (one, or several with virtual pipeline stages).
        optimizer: Megatron's optimizer.
    """

    def __init__(self, chunks: Iterable[torch.nn.Module], optimizer: Any) -> None:
        self.optimizers = sub_optimizers(optimizer)
        self._optimizer = optimizer
        super().__init__(chunks, [getattr(each, "optimizer", None) for each in self.optimizers])

    def group(self) -> tuple[int, ...]:
        """The ranks that hold the same shard."""
        return replica_group(self.optimizers)

    @override
    def objects(self) -> dict[str, Any]:
        """The optimizers' plain values and the loss scalers, after the last step that was applied."""
        guarded = GuardedUpdate.of(self._optimizer)
        scalers = scaler_states(self.optimizers) if guarded is None else guarded.scaler_states()
        return {**super().objects(), "scalers": scalers}

    @override
    def load_objects(self, objects: Mapping[str, Any]) -> None:
        """Put back what :meth:`objects` gave."""
        super().load_objects(objects)
        for optimizer, scaler in zip(self.optimizers, objects["scalers"]):
            if scaler is not None:
                optimizer.grad_scaler.load_state_dict(scaler)

    def apply_held_update(self) -> None:
        """Apply the update whose final gradients the optimizer holds; none, if they overflow."""
        guarded = GuardedUpdate.of(self._optimizer)
        if guarded is not None:
            guarded.apply()
            return
        with torch.no_grad():
            update_locally(self.optimizers)

    def settle(self) -> None:
        """Derive the model's parameters from the shards of all ranks. Collective."""
        with torch.no_grad():
            for optimizer in self.optimizers:
                if isinstance(optimizer, MixedPrecisionOptimizer) and not optimizer.is_stub_optimizer:
                    optimizer._copy_main_params_to_model_params()
            gather_parameters(self.optimizers, force=True)
