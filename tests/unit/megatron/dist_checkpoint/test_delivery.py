"""Test who reads what and who sends what to whom: everything once, evenly, and no rank twice at a time."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.integrations.megatron.dist_checkpoint.load_strategy import (
    Delivery,
    deliveries_of,
    needers_of,
    readers_of,
    rounds_of,
)

pytestmark = pytest.mark.nemo  # the folder of the code imports Megatron-core

WORLD = 6
ranks = st.integers(0, WORLD - 1)
needs = st.lists(st.sets(st.integers(0, 19)), min_size=WORLD, max_size=WORLD)
sizes = st.lists(st.integers(0, 1000), min_size=20, max_size=20)


@given(needs, sizes)
def test_each_chunk_is_read_once_by_a_rank_that_needs_it(needs: list[set[int]], sizes: list[int]) -> None:
    needers = needers_of(needs)
    readers = readers_of({chunk: sizes[chunk] for chunk in needers}, needers)
    assert readers.keys() == needers.keys() == set().union(*needs)
    assert all(chunk in needs[rank] for chunk, rank in readers.items())


@given(sizes)
def test_what_all_need_is_read_evenly(sizes: list[int]) -> None:
    readers = readers_of(dict(enumerate(sizes)), dict.fromkeys(range(len(sizes)), tuple(range(WORLD))))
    load = Counter({rank: 0 for rank in range(WORLD)})
    for chunk, rank in readers.items():
        load[rank] += max(1, sizes[chunk])
    assert max(load.values()) - min(load.values()) <= max(1, *sizes)


@given(needs, st.lists(ranks, min_size=20, max_size=20))
def test_every_rank_gets_each_chunk_that_it_needs_once(needs: list[set[int]], sources: list[int]) -> None:
    given_ = Counter(
        (each.destination, chunk)
        for each in deliveries_of(dict(enumerate(sources)), needers_of(needs))
        for chunk in each.chunks
        if each.source == sources[chunk]
    )
    wanted = {(rank, chunk) for rank, chunks in enumerate(needs) for chunk in chunks if sources[chunk] != rank}
    assert given_ == Counter(wanted)


@given(st.sets(st.tuples(ranks, ranks).filter(lambda pair: pair[0] != pair[1])))
def test_in_a_round_no_rank_takes_part_twice(pairs: set[tuple[int, int]]) -> None:
    deliveries = [Delivery(*pair, (0,)) for pair in sorted(pairs)]
    rounds = rounds_of(deliveries, WORLD)
    assert sorted(each for one in rounds for each in one) == deliveries
    for one in rounds:
        ends = [rank for each in one for rank in (each.source, each.destination)]
        assert len(ends) == len(set(ends))


def test_when_all_send_to_all_the_rounds_are_few() -> None:
    for world in (2, 3, 4, 8, 64):
        pairs = [(a, b) for a in range(world) for b in range(world) if a != b]
        rounds = rounds_of([Delivery(*pair, (0,)) for pair in pairs], world)
        least = 2 * (world - 1)  # each rank sends to and receives from every other one
        assert least <= len(rounds) <= 2 * least, world
