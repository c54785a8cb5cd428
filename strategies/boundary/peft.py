"""What parameter-efficient fine-tuning (PEFT) changes for a strategy: NeMo adds adapters and optimizer late."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from nemo.lightning.pytorch.callbacks import PEFT
from typing_extensions import override

from checkpointless.megatron.replicas import replicas
from checkpointless.megatron.state import MegatronTensors
from checkpointless.strategies.boundary.live_state import TrainerLiveState
from checkpointless.transfer.rank_groups import Group
from checkpointless.transfer.tensor_entry import Key


def peft_of(trainer: pl.Trainer) -> PEFT | None:
    """Return NeMo's PEFT callback among those of ``trainer``, or None."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return next((callback for callback in callbacks if isinstance(callback, PEFT)), None)


def trained_names(chunks: Iterable[torch.nn.Module]) -> set[str]:
    """Return the names, as in the state's keys, of all that training may change: all but frozen parameters."""
    names: set[str] = set()
    for chunk in chunks:
        names |= {name for name, parameter in chunk.named_parameters() if parameter.requires_grad}
        names |= {name for name, _ in chunk.named_buffers()}
    return names


class StateBeforeAdapters(TrainerLiveState):
    """The state of a trainer whose adapters have not been added yet: enough to decide where to resume.

    Args:
        trainer: a trainer whose strategy has been set up.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        strategy: Any = trainer.strategy
        super().__init__(trainer, MegatronTensors(strategy.megatron_parallel, None))

    @override
    def group(self) -> tuple[int, ...]:
        """Return the ranks that will hold the same shard."""
        return replicas(self._will_be_distributed)

    @override
    def parts(self, keys: Iterable[Key]) -> Mapping[Group, Sequence[Key]]:
        """Return ``keys`` by the ranks that will hold the same under them."""
        return {self.group(): list(keys)} if self._will_be_distributed else super().parts(keys)

    @property
    def _will_be_distributed(self) -> bool:
        """Whether the optimizers will be Megatron's distributed ones."""
        strategy: Any = self.trainer.strategy
        return bool(getattr(strategy.ddp_config, "use_distributed_optimizer", False))
