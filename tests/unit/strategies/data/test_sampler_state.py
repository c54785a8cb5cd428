"""Test what samplers keep for themselves: that it is taken and put back, and looked at cheaply."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import RandomSampler, Sampler

from checkpointless.inprocess import UnrecoverableError
from checkpointless.integrations.lightning.data.sampler_state import SamplerState, samplers_within

pytestmark = pytest.mark.nemo


class Keeps(Sampler[int]):
    """Keeps what it is given."""

    __slots__ = ("slotted",)

    def __init__(self, **kept: Any) -> None:
        self.slotted = 0
        for name, value in kept.items():
            setattr(self, name, value)

    def __iter__(self) -> Any:
        return iter(())


class Other(Keeps):
    """A sampler of another class."""


def generators() -> dict[str, Any]:
    return {
        "python": random.Random(1),
        "torch": torch.Generator().manual_seed(2),
        "numpy": numpy.random.default_rng(3),
        "twister": numpy.random.Generator(numpy.random.MT19937(4)),
        "philox": numpy.random.Generator(numpy.random.Philox(5)),
        "sfc": numpy.random.Generator(numpy.random.SFC64(6)),
        "legacy": numpy.random.RandomState(7),
    }


def drawn(name: str, each: Any) -> list[float]:
    """Return normal numbers too, of which every other one may be pending."""
    if name == "torch":
        return [float(torch.randn((), generator=each)) for _ in range(3)]
    if name == "python":
        return [each.gauss(0, 1) for _ in range(3)]
    return [float(each.standard_normal()) for _ in range(3)]


@pytest.mark.parametrize("name", sorted(generators()))
@pytest.mark.parametrize("has_it", [True, False], ids=["reset", "made"])
def test_a_generator_of_each_kind(name: str, has_it: bool) -> None:
    sampler = Keeps(mine=generators()[name])
    state = SamplerState([None, sampler])
    drawn(name, sampler.mine)  # type: ignore[attr-defined]
    taken = state.take()
    assert state.take() == taken
    expected = drawn(name, sampler.mine)  # type: ignore[attr-defined]
    assert state.take() != taken
    fresh = Keeps(mine=generators()[name]) if has_it else Keeps()
    SamplerState([None, fresh]).put(taken)
    assert drawn(name, fresh.mine) == expected  # type: ignore[attr-defined]


def test_plain_values_and_what_was_made_later() -> None:
    sampler = Keeps(epoch=1, ratio=0.5, name="a", flag=True, none=None, levels=[1, 2], seen={"a": 1})
    state = SamplerState([None, sampler])
    before = state.take()
    sampler.epoch, sampler.flag, sampler.levels, sampler.slotted = 2, 1, [2], 3  # type: ignore[attr-defined]
    sampler.later, sampler.seen["b"] = 5, 2  # type: ignore[attr-defined]
    after = state.take()
    assert after != before
    state.put(before)
    assert vars(sampler) == vars(
        Keeps(epoch=1, ratio=0.5, name="a", flag=True, none=None, levels=[1, 2], seen={"a": 1})
    )
    assert sampler.flag is True  # type: ignore[attr-defined]
    assert sampler.slotted == 0
    fresh = Keeps()
    SamplerState([None, fresh]).put(after)
    assert (fresh.epoch, fresh.later, fresh.seen, fresh.slotted) == (2, 5, {"a": 1, "b": 2}, 3)  # type: ignore[attr-defined]


def test_a_generator_under_two_names_stays_one() -> None:
    drawn_from = random.Random(3)
    taken = SamplerState([None, Keeps(one=drawn_from, two=drawn_from)]).take()
    fresh: Any = Keeps()
    SamplerState([None, fresh]).put(taken)
    assert fresh.one is fresh.two
    assert fresh.one.random() == drawn_from.random()


def test_a_sampler_of_another_class_is_left_alone() -> None:
    taken = SamplerState([None, Keeps(epoch=4)]).take()
    other: Any = Other(epoch=0)
    SamplerState([None, other]).put(taken)
    assert other.epoch == 0


def test_samplers_in_attributes_are_found() -> None:
    inner, one, two = Keeps(), RandomSampler([1]), Keeps()
    inner.base = one  # type: ignore[attr-defined]
    outer = Keeps(parts=[inner, two])
    assert samplers_within(outer) == [outer, inner, two, one]


def test_of_a_librarys_sampler_the_generator_alone_is_kept() -> None:
    plain, own = RandomSampler([1]), RandomSampler([1], generator=torch.Generator())
    assert not SamplerState([None, plain]).take()
    assert SamplerState([None, own]).generators() == [own.generator]
    assert not SamplerState([None, own]).has_own


def test_large_values_are_not_kept() -> None:
    sampler = Keeps(order=list(range(5000)), weights=torch.ones(5000), nested=[[1]], text="a" * 5000)
    assert [key.rpartition("|")[2] for key in SamplerState([None, sampler]).take()] == ["slotted"]


def test_the_smallest_values_are_kept_if_all_are_too_much_and_too_many_generators_are_refused() -> None:
    many = {f"list{number}": list(range(1000, 4000 + number)) for number in range(20)}
    kept = {key.rpartition("|")[2] for key in SamplerState([None, Keeps(**many)]).take()}
    assert {"slotted", "list0"} < kept
    assert "list19" not in kept
    generators = Keeps(**{f"g{number}": random.Random(number) for number in range(60)})
    with pytest.raises(UnrecoverableError, match="the sampler Keeps keeps more than 128 KiB in generators"):
        SamplerState([None, generators]).take()


@pytest.mark.parametrize(
    "make",
    [lambda: list(range(100)), lambda: numpy.arange(100), lambda: torch.arange(100)],
    ids=["list", "numpy", "torch"],
)
def test_an_order_is_put_back_where_it_is(make: Callable[[], Any]) -> None:
    sampler = Keeps(order=make())
    state = SamplerState([None, sampler])
    before = state.take()
    again = Keeps(order=make())
    order = again.order  # type: ignore[attr-defined]
    order[0], order[1] = order[1] + 0, order[0] + 0
    changed = SamplerState([None, again])
    assert changed.take() != before
    changed.put(before)
    assert list(order) == list(range(100))
    assert again.order is order  # type: ignore[attr-defined]
