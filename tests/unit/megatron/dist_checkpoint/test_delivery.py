"""Test who reads what and who sends what to whom: everything once, evenly, and many pairs at a time."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.integrations.megatron.dist_checkpoint.strategies import (
    _deliveries_of,
    _Need,
    _needs_of,
    _readers_of,
)

pytestmark = pytest.mark.nemo  # the folder of the code imports Megatron-core

WORLD = 6
CHUNKS = [f"chunk {number}" for number in range(20)]
wishes = st.lists(st.sets(st.sampled_from(CHUNKS)), min_size=WORLD, max_size=WORLD)
sizes = st.lists(st.integers(0, 1000), min_size=20, max_size=20)


@given(wishes, sizes, st.lists(st.integers(0, WORLD - 1), min_size=20, max_size=20))
def test_each_chunk_is_read_once_and_sent_once_to_each_rank_that_needs_it(
    wishes: list[set[str]], sizes: list[int], sources: list[int]
) -> None:
    about, source_of = dict(zip(CHUNKS, sizes)), dict(zip(CHUNKS, sources))
    needs = _needs_of([{id_: about[id_] for id_ in each} for each in wishes])
    readers = _readers_of(needs)
    assert readers.keys() == needs.keys() == set().union(*wishes)
    assert all(id_ in wishes[rank] for id_, rank in readers.items())
    known = {id_: source_of[id_] for id_ in needs}
    sent = Counter((each.destination, id_) for each in _deliveries_of(known, needs, WORLD) for id_ in each.names)
    wanted = {(rank, id_) for rank, each in enumerate(wishes) for id_ in each if source_of[id_] != rank}
    assert sent == Counter(wanted)


@given(sizes)
def test_what_all_need_is_read_evenly(sizes: list[int]) -> None:
    readers = _readers_of({id_: _Need(size, [*range(WORLD)]) for id_, size in zip(CHUNKS, sizes)})
    load = Counter({rank: 0 for rank in range(WORLD)})
    for id_, size in zip(CHUNKS, sizes):
        load[readers[id_]] += max(1, size)
    assert max(load.values()) - min(load.values()) <= max(1, *sizes)


@pytest.mark.parametrize("world", [2, 3, 4, 8, 64])
def test_when_all_send_to_all_many_pairs_work_at_the_same_time(world: int) -> None:
    needs = {str(rank): _Need(1, [*range(world)]) for rank in range(world)}
    free = [0] * world  # by rank, when it has made its deliveries so far
    for each in _deliveries_of({str(rank): rank for rank in range(world)}, needs, world):
        free[each.source] = free[each.destination] = max(free[each.source], free[each.destination]) + 1
    assert max(free) <= 2 * world  # each rank sends to and receives from every other one
