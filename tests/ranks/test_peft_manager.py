"""Test the manager for fine-tuning between real processes, in torch alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks.nemo_zygote import Zygote

pytestmark = pytest.mark.ranks
RECOVER = "tests.ranks.peft_ranks:recover"


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
