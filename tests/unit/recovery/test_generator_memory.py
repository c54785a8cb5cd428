"""Test that memory tells of every change of a generator, and is not looked at where it is something else."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from checkpointless.recovery import generator_memory, rng
from checkpointless.recovery.generator_memory import numpy_memory, python_memory, torch_memory
from checkpointless.recovery.rng import RngSource, RngStates, register_rng_source


@pytest.mark.parametrize(
    "move",
    [
        lambda generator: torch.rand(1, generator=generator),
        lambda generator: torch.rand(624, generator=generator),  # the position is the same afterwards
        lambda generator: torch.randn(1, generator=generator),
        lambda generator: torch.randn(1, generator=generator, dtype=torch.float64),
        lambda generator: generator.manual_seed(8),
        lambda generator: generator.set_state(torch.Generator().manual_seed(9).get_state()),
    ],
)
def test_the_memory_of_torchs_generator_changes_with_its_state(move: Callable[[torch.Generator], object]) -> None:
    generator = torch.Generator().manual_seed(7)
    memory = torch_memory(generator)
    assert memory is not None, "this torch keeps the words where they are looked for"
    torch.randn(1, generator=generator)  # leaves a second normal number pending
    seen = {memory.raw}
    for _ in range(2):
        before = generator.get_state()
        move(generator)
        assert (memory.raw in seen) == torch.equal(before, generator.get_state())
        seen.add(memory.raw)


def test_python_and_numpys_memory_change_with_each_draw() -> None:
    mine, numpys = random.Random(3), np.random.MT19937(3)
    memories = python_memory(mine), numpy_memory(numpys)
    for memory, draw in zip(memories, (mine.random, lambda: numpys.random_raw(1))):
        assert memory is not None
        seen = [memory.raw]
        for _ in range(1300):
            draw()
            seen.append(memory.raw)
        assert len(set(seen)) == len(seen)


def test_generators_of_another_kind_are_not_looked_into() -> None:
    class Mine(random.Random):
        """A user's own."""

    assert python_memory(Mine(1)) is None
    assert python_memory(None) is None
    assert numpy_memory(np.random.PCG64(1)) is None


def test_a_torch_that_keeps_its_words_elsewhere_is_asked_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator_memory, "_torch_offset", lambda: None)
    assert torch_memory(torch.Generator()) is None
    stream = rng._TorchStream(torch.get_rng_state, lambda: torch.default_generator)
    before = stream.take()
    assert stream.take() is before
    torch.rand(1)
    assert stream.take() == torch.get_rng_state().numpy().tobytes() != before


def test_streams_that_have_not_moved_are_the_same_dictionary_and_any_draw_makes_another() -> None:
    generator = torch.Generator().manual_seed(1)
    value = 1

    def get() -> dict[str, bytes]:
        return {"0": generator.get_state().numpy().tobytes()}

    register_rng_source("own", RngSource(get, lambda _: None, generators=(generator,)))
    register_rng_source("looked", RngSource(lambda: value, lambda _: None, look=lambda: value))
    np.random.seed(3)  # nothing is pending
    taken = [RngStates.capture().streams]
    for move in (random.random, np.random.rand, lambda: torch.rand(1), lambda: torch.rand(1, generator=generator)):
        assert RngStates.capture().streams is taken[-1]
        move()
        taken.append(RngStates.capture().streams)
    value = 2
    taken.append(RngStates.capture().streams)
    assert all(before != after for before, after in itertools.pairwise(taken))
    assert RngStates(taken[-1]).of_source("looked") == 2
    assert RngStates(taken[-1]).of_source("own") == get()


def test_what_is_put_back_is_looked_at_anew_although_the_memory_is_the_same() -> None:
    np.random.seed(3)
    np.random.standard_normal()
    pending = RngStates.capture()
    np.random.standard_normal()  # uses the pending one up: no word changes
    used = RngStates.capture()
    pending.restore()
    assert RngStates.capture().same_streams(pending)
    assert not RngStates.capture().same_streams(used)
