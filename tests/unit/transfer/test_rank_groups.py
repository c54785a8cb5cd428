"""Groups of ranks: all members agree on them, and they travel in few bytes."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.state.port import groups_of, holders_of, split
from checkpointless.transfer.rank_groups import CompactGroups, Group, all_groups, compact, names
from tests.unit.recovery.made_up_state import BUFFER, MOMENTUM, WEIGHT, MadeUpState

ANY_GROUP = st.sets(st.integers(0, 40), min_size=1).map(lambda ranks: tuple(sorted(ranks)))


@st.composite
def along_a_mesh(draw: st.DrawFn) -> Group:
    """Return the ranks along some dimensions of a mesh."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    mesh = torch.arange(torch.Size(shape).numel()).view(shape)
    index = tuple(slice(None) if draw(st.booleans()) else draw(st.integers(0, size - 1)) for size in shape)
    return tuple(int(rank) for rank in mesh[index].flatten())


@given(st.lists(st.one_of(ANY_GROUP, along_a_mesh()), max_size=5))
def test_what_travels_is_the_same_group(groups: list[Group]) -> None:
    told = json.loads(json.dumps([compact(group) for group in groups]))
    assert CompactGroups(300).read(told) == tuple(groups)


@pytest.mark.parametrize(
    "group",
    [
        tuple(range(4096)),
        tuple(range(3, 4096, 8)),
        tuple(rank for rank in range(4096) if rank % 64 < 8 and rank % 2),
    ],
    ids=["all", "every eighth", "two dimensions"],
)
def test_thousands_of_ranks_along_a_mesh_take_few_bytes(group: Group) -> None:
    told = json.dumps(compact(group))
    assert len(told) < 60
    assert CompactGroups(4096).read([json.loads(told)]) == (group,)


def test_equal_groups_are_one_object_that_is_made_once() -> None:
    groups = CompactGroups(8)
    first, again = groups.read([[0, 3]]), groups.read([[0, 3]])
    assert first[0] is again[0]


@pytest.mark.parametrize("told", [{"first": 0, "by": [[1, 10**9], [1, 10**9]]}, [0, 1, 2]])
def test_a_group_of_more_ranks_than_there_are_takes_no_memory(told: object) -> None:
    with pytest.raises(ValueError, match="was reported, and there are 2"):
        CompactGroups(2).read([told])


@given(st.lists(st.tuples(st.sets(st.sampled_from(range(6)), min_size=1)), min_size=1, max_size=6), st.randoms())
def test_groups_are_taken_if_all_members_tell_them_and_only_then(
    drawn: list[tuple[set[int]]], dice: object
) -> None:
    groups = {tuple(sorted(ranks)) for (ranks,) in drawn} | {tuple(range(6))}
    parts = {rank: [group for group in sorted(groups) if rank in group] for rank in range(6)}
    assert all_groups(parts) == sorted(groups)
    for rank, group in itertools.product(parts, groups):
        other = [each for each in parts[rank] if each != group] if rank in group else [*parts[rank], group]
        if len(group) > 1 or rank not in group:
            with pytest.raises(ValueError, match=r"contradict each other|is in no replica group"):
                all_groups({**parts, rank: other})


def test_a_contradiction_is_told_with_a_rank_that_says_something_else() -> None:
    with pytest.raises(ValueError, match="of ranks 0, 1, 2, rank 2 says something else"):
        all_groups({0: [(0, 1, 2)], 1: [(0, 1, 2)], 2: [(2,)]})
    with pytest.raises(ValueError, match="rank 1 is in no replica group"):
        all_groups({0: [(0,)], 1: []})


def test_many_ranks_are_named_by_the_first_ones() -> None:
    assert names([3, 5]) == "3, 5"
    assert names(range(9)) == "0, 1, 2, 3, 4, 5, 6, 7, ... (9 ranks)"


def test_a_state_is_split_by_its_holders() -> None:
    live = MadeUpState(3)
    live.holders = {WEIGHT: (0, 1, 2, 3)}
    parts = split(live, live.present)
    assert {group: list(tensors) for group, tensors in parts.items()} == {
        (0, 1): [BUFFER, MOMENTUM],
        (0, 1, 2, 3): [WEIGHT],
    }
    assert groups_of(live) == {(0, 1): "model.0.buffer", (0, 1, 2, 3): "model.0.weight"}
    assert holders_of(live, [WEIGHT]) == (0, 1, 2, 3)
    assert holders_of(live, [WEIGHT, BUFFER]) == holders_of(live, []) == (0, 1)


def test_a_tensor_in_no_part_or_in_two_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    live = MadeUpState(3)
    for wrong in ({(0, 1): [WEIGHT, BUFFER]}, {(0, 1): [WEIGHT, BUFFER, MOMENTUM], (1,): [WEIGHT]}):
        monkeypatch.setattr(live, "replica_groups", lambda keys, wrong=wrong: wrong)
        with pytest.raises(RuntimeError, match=r"replica_groups\(\) divides 3 keys into [24]"):
            split(live, live.present)
