"""The training state of a NeMo trainer: Megatron's tensors and what Lightning keeps beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.model_helpers import is_overridden

from checkpointless.megatron.state import MegatronTensors
from checkpointless.recovery.transfer import Key, TensorEntry
from checkpointless.strategies.progress import StepBoundary, settle


class InMemoryCheckpoint(dict[str, Any]):
    """A Lightning checkpoint whose model and optimizer tensors are already in their place."""


class TrainerLiveState:
    """The state of one trainer, as :class:`checkpointless.recovery.live_state.LiveState` asks for it.

    Args:
        trainer: its strategy has been set up.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self.trainer = trainer
        self.boundary: StepBoundary | None = None
        strategy: Any = trainer.strategy
        self._tensors = MegatronTensors(strategy.megatron_parallel, strategy.optimizers[0].mcore_optimizer)

    def group(self) -> tuple[int, ...]:
        """The ranks that hold the same shard."""
        return self._tensors.group()

    def tensors(self) -> dict[Key, torch.Tensor]:
        """Every tensor of model and optimizer."""
        return self._tensors.tensors()

    def shard(self) -> dict[Key, torch.Tensor]:
        """What this rank's update owns."""
        return self._tensors.shard()

    def objects(self, step: int) -> dict[str, Any]:
        """Loops, schedulers, callbacks, data position and the optimizer's plain values, after ``step``."""
        trainer = self.trainer
        settle(trainer, self.boundary, step)
        checkpoint: dict[str, Any] = {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": pl.__version__,
            "state_dict": {},
            "optimizer_states": [],
            "loops": {"fit_loop": trainer.fit_loop.state_dict()},
            "callbacks": call._call_callbacks_state_dict(trainer),
            "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        }
        datamodule = getattr(trainer, "datamodule", None)
        if datamodule is not None:
            checkpoint[type(datamodule).__qualname__] = call._call_lightning_datamodule_hook(trainer, "state_dict")
        consumed = _consumed_samples(trainer)
        sampler = _sampler(trainer)
        if sampler is not None and not self.has_begun():
            # No batch has been asked for: what the sampler started from is where the job stands. The sampler's own
            # formula counts the steps before a restore twice until the data loader is made.
            consumed = int(sampler.init_consumed_samples)
            if datamodule is not None and "consumed_samples" in checkpoint[type(datamodule).__qualname__]:
                checkpoint[type(datamodule).__qualname__]["consumed_samples"] = consumed
        return {
            "checkpoint": checkpoint,
            "consumed_samples": consumed,
            "megatron": self._tensors.objects(),
        }

    def has_begun(self) -> bool:
        """Whether a step has begun since the state was loaded."""
        return self.boundary is not None

    def apply_held_update(self) -> None:
        """Apply the update whose final gradients are held."""
        self._tensors.apply_held_update()

    def adopt(self, tensors: Mapping[Key, torch.Tensor]) -> set[Key]:
        """Use those of ``tensors`` themselves that can be used without a copy."""
        return self._tensors.adopt(tensors)

    def room(self, entries: Sequence[TensorEntry]) -> Mapping[Key, torch.Tensor]:
        """Storage for ``entries``."""
        return self._tensors.room(entries)

    def load_objects(self, objects: Mapping[str, Any]) -> None:
        """Put the optimizer's plain values and the data position back; the rest is Lightning's to load."""
        self._tensors.load_objects(objects["megatron"])
        consumed, step = objects["consumed_samples"], objects["checkpoint"]["global_step"]
        sampler: Any = _sampler(self.trainer)
        datamodule = getattr(self.trainer, "datamodule", None)
        if consumed is not None and sampler is not None and not is_overridden("load_state_dict", datamodule):
            sampler.init_consumed_samples = sampler.prev_consumed_samples = consumed
            sampler.init_global_step = step
            sampler.if_first_step = 1

    def settle(self) -> None:
        """Derive the parameters from all ranks' shards. Collective."""
        self._tensors.settle()


def samples_per_step(trainer: pl.Trainer) -> int | None:
    """How many samples of the whole job a step takes; None if no Megatron sampler says so, or it varies."""
    sampler = _sampler(trainer)
    size = getattr(sampler, "global_batch_size", None)
    return size if isinstance(size, int) and not getattr(sampler, "rampup_batch_size", None) else None


def _sampler(trainer: pl.Trainer) -> Any:
    sampler = getattr(trainer.strategy, "data_sampler", None)
    return sampler if hasattr(sampler, "init_consumed_samples") else None


def _consumed_samples(trainer: pl.Trainer) -> int | None:
    """How many samples of the whole job lie behind ``trainer.global_step``, for a Megatron sampler."""
    sampler = _sampler(trainer)
    if sampler is None:
        return None
    return int(sampler.compute_consumed_samples(trainer.global_step - sampler.init_global_step))
