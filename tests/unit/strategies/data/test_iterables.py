"""Test iterable datasets that are gone through once more: what they draw is drawn again, or they are refused."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from checkpointless.integrations.lightning.data.loaders import DataPosition, _repeat_items
from checkpointless.state.rng import RngStates
from checkpointless.strategies.megatron_strategy import _PhasedIterator
from tests.unit.strategies.data.starts import Starts

pytestmark = pytest.mark.nemo

ITEMS = 24


class Rows(IterableDataset[int]):
    """Gives numbers that are drawn, or counted, in one way."""

    def __init__(self, how: str) -> None:
        self.how, self.passes, self.own = how, 0, random.Random(3)

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        rows = list(range(ITEMS))
        if self.how == "when torch asks":
            random.shuffle(rows)
            return iter(rows)
        return self.items(rows)

    def items(self, rows: list[int]) -> Iterator[int]:
        if self.how == "for the first item":
            random.shuffle(rows)
        for row in rows:
            if self.how == "by itself":
                row = self.own.randrange(ITEMS)
            elif self.how == "counts":
                row = (row * self.passes) % ITEMS
            yield row


def made(how: str, starts: Starts, position: DataPosition | None) -> DataLoader[int]:
    loader: DataLoader[int] = DataLoader(Rows(how), batch_size=None)
    _repeat_items(loader, starts, position)
    return loader


def trained(items: Iterator[int], count: int | None = None) -> list[int]:
    """Return as many items; the training draws between them."""
    found = []
    for item in itertools.islice(items, count):
        found.append(item)
        random.random(), torch.rand(2)
    return found


@pytest.mark.parametrize("within", [1, 2, 7])
@pytest.mark.parametrize("how", ["when torch asks", "for the first item", "by itself", "counts"])
def test_the_second_pass_is_gone_through_once_more(how: str, within: int) -> None:
    random.seed(1), torch.manual_seed(1)
    starts = Starts()
    loader = made(how, starts, None)
    assert len(trained(iter(loader))) == ITEMS
    second = iter(loader)
    delivered = trained(second, within)
    kept, moment = starts.kept, RngStates.capture().to_bytes()
    expected = [trained(second), trained(iter(loader))]

    random.seed(2), torch.manual_seed(2)
    starts_again = Starts()
    starts_again.kept = kept
    again = made(how, starts_again, DataPosition(within, within))
    items = iter(again)
    assert list(itertools.islice(items, within)) == delivered
    RngStates.from_bytes(moment).restore()
    assert [trained(items), trained(iter(again))] == expected


def test_a_data_step_may_take_the_next_batch_after_one_that_cannot_be_read() -> None:
    batches = map(int, ["0", "damaged", "2"])
    call: Any = SimpleNamespace(steps=SimpleNamespace(making=1), enter_phase=lambda *_: None)
    phased = _PhasedIterator(batches, call)
    assert next(phased) == 0
    with pytest.raises(ValueError, match="damaged"):
        next(phased)
    assert list(phased) == [2]
