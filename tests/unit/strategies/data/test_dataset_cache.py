"""Test the cache of Megatron's datasets with Megatron's own builder, and other ranks that are made up."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest

from checkpointless.integrations.lightning.frameworks import nemo
from checkpointless.integrations.lightning.frameworks.nemo import cache_megatron_datasets

pytestmark = pytest.mark.nemo


class Tokenizer:
    """Represents a tokenizer, by which Megatron names its index files."""

    def __init__(self, path: str = "a", eod: int = 3) -> None:
        self.path = path
        self.eod = self.pad = eod
        self.unique_identifiers = OrderedDict({"class": "Tokenizer"})
        self.vocab_size = 16


class Call:
    """Represents the running wrapper of a block."""

    generation = 0


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Iterator[Call]:
    call = Call()
    monkeypatch.setattr(nemo, "active_call_wrapper", lambda: call)
    monkeypatch.setattr(nemo, "true_on_all", lambda mine: mine)
    monkeypatch.setattr(nemo, "emit_event", lambda *_, **__: None)
    cache_megatron_datasets()
    yield call
    nemo._patches.undo()


def build(size: int = 8, tokenizer: Any = None, seed: int = 1) -> list[Any]:
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset

    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=16,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        split="8,1,1",
        tokenizer=tokenizer or Tokenizer(),
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, [size, 2, 2], lambda: True, config).build()


def test_equal_arguments_give_what_was_built_before_the_fault(call: Call) -> None:
    first = build()
    call.generation = 1
    again = build()
    assert [id(each) for each in again] == [id(each) for each in first]
    call.generation = 2
    assert build()[0] is first[0]


@pytest.mark.parametrize(
    "other",
    [{"size": 9}, {"seed": 2}, {"tokenizer": Tokenizer("b")}, {"tokenizer": Tokenizer(eod=4)}],
    ids=["size", "seed", "path", "eod"],
)
def test_other_arguments_are_built(call: Call, other: dict[str, Any]) -> None:
    first = build()
    call.generation = 1
    assert build(**other)[0] is not first[0]
    assert build()[0] is first[0], "the entry before is kept, in whatever order the function builds"


def test_all_build_if_one_rank_is_new(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build()
    call.generation = 1
    monkeypatch.setattr(nemo, "true_on_all", lambda mine: False)
    assert build()[0] is not first[0]


def test_a_tokenizer_that_says_nothing_of_itself_is_another_one(call: Call) -> None:
    class Local(Tokenizer): ...

    first = build(tokenizer=(tokenizer := Local()))
    call.generation = 1
    assert build(tokenizer=tokenizer)[0] is not first[0], "its class cannot be told from another one"
