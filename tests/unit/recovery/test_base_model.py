"""The frozen weights are kept apart from what is held, once, and by reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from checkpointless.inprocess.parameter_update_lock import CommitState
from checkpointless.recovery import refill as base_model
from checkpointless.recovery.decide import Decision, Verdict
from checkpointless.recovery.refill import BaseModel
from checkpointless.state.held_state import HeldState
from checkpointless.state.serialization.digest import MemoryChecksumManager
from tests.unit.recovery.made_up_state import BUFFER, MOMENTUM, WEIGHT, MadeUpJournal, MadeUpState


def frozen(checksum: bool = False) -> BaseModel:
    base = BaseModel(MemoryChecksumManager(checksum))
    base.trained = {"buffer"}
    return base


def held(live: MadeUpState) -> HeldState:
    return HeldState.of(
        MadeUpJournal(live), CommitState(3, ready=False, torn=False), MemoryChecksumManager(), fit=1, offset=0
    )


def test_frozen_weights_are_taken_out_of_what_is_held() -> None:
    base, live = frozen(), MadeUpState(3)
    state = held(live)
    base.part_from(state)
    assert list(state.tensors) == [BUFFER, MOMENTUM]
    assert base.weights is not None
    assert base.weights[WEIGHT].data_ptr() == live.present[WEIGHT].data_ptr()
    later = held(MadeUpState(4))
    base.part_from(later)
    assert list(later.tensors) == [BUFFER, MOMENTUM]
    assert base.weights[WEIGHT].data_ptr() == live.present[WEIGHT].data_ptr(), "those that were kept stay kept"
    base.attached(MadeUpState(5))
    assert base.weights[WEIGHT].item() == 5


def test_nothing_is_frozen_before_it_is_known_what_is_trained() -> None:
    base, state = BaseModel(MemoryChecksumManager()), held(MadeUpState(3))
    base.part_from(state)
    assert base.weights is None
    assert list(state.tensors) == [WEIGHT, BUFFER, MOMENTUM]
    assert base.digests(MadeUpState(3)) == {}


def test_the_digest_is_that_of_the_running_models_frozen_weights() -> None:
    base = frozen()
    base.attached(MadeUpState(3))
    assert base.digests(MadeUpState(3)) != base.digests(MadeUpState(4))


def test_what_is_offloaded_is_not_offloaded_again() -> None:
    base, state = frozen(), held(MadeUpState(3))
    base.part_from(state)
    base.offload(state)
    first = base.weights
    base.offload(state)
    assert base.weights is first
    assert first is not None
    assert first[WEIGHT].item() == 3


@pytest.mark.parametrize(
    ("answers", "checksum", "lacking"),
    [([True, False, False], False, {1, 2}), ([True, True, False], False, {2}), ([False] * 3, True, {1, 2})],
)
def test_those_are_filled_that_are_refilled_and_have_no_weights(
    monkeypatch: pytest.MonkeyPatch, answers: list[bool], checksum: bool, lacking: set[int]
) -> None:
    told: list[Any] = []

    def gather(mine: Any) -> list[bool]:
        told.append(mine)
        return answers

    monkeypatch.setattr(base_model, "all_gather_json", gather)
    base = frozen(checksum)
    base.attached(MadeUpState(3))
    decision = Decision(
        Verdict.RESUME, 3, refills={1: (0,), 2: (0,)}, parts=dict.fromkeys((1, 2), (((0, 1, 2), (0,)),))
    )
    assert base._ranks_without(decision) == lacking
    assert told == [not checksum]


def test_where_nobody_is_refilled_nobody_is_asked() -> None:
    assert frozen()._ranks_without(Decision(Verdict.RESUME, 3)) == set()


def test_without_a_base_model_all_is_held_and_nothing_is_moved() -> None:
    base, state = BaseModel(MemoryChecksumManager()), held(MadeUpState(3))
    base.part_from(state)
    base.attached(MadeUpState(3))
    base.offload(state)
    assert list(state.tensors) == [WEIGHT, BUFFER, MOMENTUM]
    assert base.digests(MadeUpState(3)) == {}
    assert base.restore(MadeUpState(3), Decision(Verdict.RESUME, 3), torch.iinfo(torch.int32).max) == 0
