"""Test the manager for fine-tuning between real processes, in torch alone."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from checkpointless.recovery import PEFTCheckpointManager
from checkpointless.state.journal import FrontEnd, StepJournal
from checkpointless.state.module_tensors import TrainingTensors
from checkpointless.state.port import SnapshotPoint
from checkpointless.transfer.rank_groups import Group
from checkpointless.transfer.tensor_entry import Key
from tests.ranks.nemo_zygote import Zygote

pytestmark = pytest.mark.ranks

RECOVER = "tests.ranks.test_peft_manager:recover"


def test_the_living_keep_the_base_model_where_it_is_and_others_are_filled(nemo_zygote: Zygote) -> None:
    outcomes = nemo_zygote.run(3, RECOVER, {"lost": [[1], [], [0]]})
    same_memory = [[outcome["base_is_the_same_memory"] for outcome in rank] for rank in outcomes]
    assert same_memory == [[True, True, False], [False, True, True], [True, True, True]]
    assert all(outcome["equal"] for rank in outcomes for outcome in rank)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"enable_checksum": True}, marks=pytest.mark.long),
        {"enable_checksum": True, "enable_offload": True},
    ],
    ids=["alone", "checksum", "checksum-offload"],
)
def test_the_base_model_can_be_asked_for_first(nemo_zygote: Zygote, settings: dict[str, Any]) -> None:
    outcomes = nemo_zygote.run(2, RECOVER, {"lost": [[0], [1]], "base_first": True, **settings})
    for outcome in (outcome for rank in outcomes for outcome in rank):
        assert outcome["base_first"]
        assert outcome["base_keys"] == ["base.bias", "base.weight"]
        assert outcome["equal"]


def test_told_of_no_adapters_it_restores_all_together(nemo_zygote: Zygote) -> None:
    outcomes = nemo_zygote.run(2, RECOVER, {"lost": [[0], []], "trained": []})
    assert all(outcome["equal"] for rank in outcomes for outcome in rank)


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
