"""Fine-tune in torch alone, and recover, in the ranks of test_peft_manager.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from checkpointless.recovery import PEFTCheckpointManager
from checkpointless.state.journal import FrontEnd, StepJournal
from checkpointless.state.module_tensors import TrainingTensors
from checkpointless.state.port import SnapshotPoint
from checkpointless.transfer.rank_groups import Group
from checkpointless.transfer.tensor_entry import Key


class FineTuning(TrainingTensors):
    """Holds a frozen layer and a trained one, the same on every rank: the whole job is one replica group."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.base = torch.nn.Linear(64, 64).requires_grad_(False)
        self.trained = torch.nn.Linear(64, 4)
        self.optimizer = torch.optim.Adam(self.trained.parameters(), lr=0.1)
        super().__init__([torch.nn.ModuleDict({"base": self.base, "trained": self.trained})], [self.optimizer])

    def train(self) -> None:
        self.trained(self.base(torch.ones(64))).sum().backward()
        self.optimizer.step()

    def replica_groups(self, keys: Iterable[Key]) -> Mapping[Group, Sequence[Key]]:
        return {tuple(range(dist.get_world_size())): list(keys)}

    def finish_update(self) -> None:
        self.optimizer.step()


def recover(
    lost: Sequence[Sequence[int]],
    base_first: bool = False,  # the base model is asked for before all the rest
    trained: Sequence[str] = ("trained.weight", "trained.bias"),
    **settings: Any,
) -> list[dict[str, Any]]:
    """Train a step, and recover from faults, in each of which the processes of the ranks in ``lost`` are new."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    manager = PEFTCheckpointManager(**settings)
    manager.params_to_save = set(trained)
    state = FineTuning(seed=0)
    state.train()
    journal = StepJournal(state, manager, FrontEnd())
    journal.reached(0, SnapshotPoint.COMMITTED)
    manager.attach(journal, 0)
    outcomes = []
    for generation, gone in enumerate(lost, 1):
        expected = {key: tensor.clone() for key, tensor in state.tensors().items()}
        weight = state.base.weight.data_ptr()
        manager.hold()
        if rank in gone:
            manager = PEFTCheckpointManager(**settings)
            manager.params_to_save = set(trained)
        state = FineTuning(seed=generation)
        journal = StepJournal(state, manager, FrontEnd())
        strategy = SimpleNamespace(journal=lambda journal=journal: journal)
        trainer: Any = SimpleNamespace(strategy=strategy)  # with what the manager asks of it
        outcome: dict[str, Any] = {}
        if base_first:
            loaded = manager.try_base_model_checkpointless_load(trainer)
            assert loaded is not None
            outcome["base_first"] = all(
                torch.equal(expected[key], each) for key, each in loaded["state_dict"].items()
            )
            outcome["base_keys"] = sorted(str(key[-1]) for key in loaded["state_dict"])
        assert manager.try_checkpointless_load(trainer) is not None
        manager.attach(journal, 0)
        now = state.tensors()
        outcome["equal"] = list(now) == list(expected) and all(torch.equal(expected[key], now[key]) for key in now)
        outcome["base_is_the_same_memory"] = state.base.weight.data_ptr() == weight
        outcomes.append(outcome)
        dist.barrier()
    return outcomes
