"""Test states that know their tensors: how they are taken apart and come back as the class that they were."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from checkpointless.replication.local_checkpoint import (
    BasicTensorAwareStateDict,
    LocalCheckpointError,
    LocalCheckpointManager,
    TensorAwareStateDict,
    register_form,
)
from checkpointless.replication.tensor_aware import content_of, state_of
from checkpointless.state.serialization.state_tree import StateTreeError
from tests.ranks.local_checkpoint_ranks import bits, state


def test_tensors_are_taken_out_and_put_back_in_order() -> None:
    aware = BasicTensorAwareStateDict(state(0, 5))
    taken = aware.pop_tensors()
    assert aware.is_hollow
    assert not any(isinstance(each, torch.Tensor) for each in aware.state_dict["model"].values())
    aware.insert_tensors(taken)
    assert not aware.is_hollow
    assert bits(aware.state_dict) == bits(state(0, 5))
    assert list(map(id, aware.tensors)) == list(map(id, taken))


class _Parameters(dict[str, Any]):
    """As Lightning keeps hyper-parameters."""


class _Pair(NamedTuple):
    first: torch.Tensor
    second: int


def test_subclasses_of_dict_and_tuple_come_back_plain() -> None:
    found = state_of(content_of({"hyper_parameters": _Parameters(lr=0.1), "pair": [_Pair(torch.zeros(2), 1)]}))
    assert repr(found) == repr({"hyper_parameters": {"lr": 0.1}, "pair": [(torch.zeros(2), 1)]})


@pytest.mark.parametrize("call", ["pop_tensors", "copy_tensors_to_cpu", "restore_tensor_device"])
def test_a_hollow_state_says_so(call: str) -> None:
    aware = BasicTensorAwareStateDict({"a": torch.zeros(3)})
    aware.pop_tensors()
    with pytest.raises(RuntimeError, match="the tensors of this state have been taken out"):
        getattr(aware, call)()
    with pytest.raises(ValueError, match="2 tensors cannot be put in 1 places"):
        aware.insert_tensors([torch.zeros(3)] * 2)
    aware.init_tensors()
    with pytest.raises(RuntimeError, match="have not been taken out"):
        aware.init_tensors()


def test_a_saved_state_comes_back_as_its_class_and_the_given_one_stays(tmp_path: Path) -> None:
    manager = LocalCheckpointManager(tmp_path)
    given = BasicTensorAwareStateDict(state(0, 5))
    manager.save(given, 5)
    assert bits(given.state_dict) == bits(state(0, 5))
    loaded, _ = manager.load()
    assert type(loaded) is BasicTensorAwareStateDict
    assert bits(loaded.state_dict) == bits(state(0, 5))


@dataclass
class Pair(TensorAwareStateDict):
    """Represents a state of a user's own class."""

    one: torch.Tensor
    other: torch.Tensor

    is_hollow = False

    @property
    def tensors(self) -> Any:
        return self.one, self.other

    def _unused(self, *arguments: Any, **settings: Any) -> Any:
        raise NotImplementedError

    pop_tensors = insert_tensors = init_tensors = copy_tensors_to_cpu = _unused

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        pass


def test_a_class_of_ones_own_has_to_be_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkpointless.replication.tensor_aware._forms", {})
    given = Pair(torch.zeros(1), torch.ones(2))
    with pytest.raises(StateTreeError, match="Pair, which is not known: give it to register_form, on every rank"):
        content_of(given)
    register_form(Pair, lambda pair: [pair.one, pair.other], lambda tree: Pair(*tree))
    manager = LocalCheckpointManager(tmp_path)
    manager.save(given, 1)
    loaded, _ = manager.load()
    assert (type(loaded), loaded.other.tolist()) == (Pair, [1, 1])
    monkeypatch.setattr("checkpointless.replication.tensor_aware._forms", {})
    with pytest.raises(LocalCheckpointError, match="Pair is not known on this rank: call register_form"):
        manager.load()
