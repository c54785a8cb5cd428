"""The copies that a recovery is made of: one step for all ranks, the newest that is whole, the cheapest copies."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from checkpointless.replication.parts import PartId, SaveId
from checkpointless.replication.retrieval import Copy, choose, choose_parts

PLACES = ("living", "memory", "local", "shared")
Holding = dict[str, list[PartId]]


def save(step: int) -> SaveId:
    return SaveId(step, "0" * 24)


def part(step: int, rank: int) -> PartId:
    return PartId(save(step), rank)


def of_this_training(_: SaveId) -> bool:
    return True


def test_a_damaged_copy_is_replaced_by_the_next_one_and_then_by_the_next_place() -> None:
    holdings = [{"memory": [part(5, 0)], "shared": [part(5, 0)]}, {"living": [part(5, 1)], "memory": [part(5, 0)]}]
    used: list[Copy] = []
    for expected in (("memory", 0), ("memory", 1), ("shared", 0)):
        copy = choose(holdings, PLACES, of_this_training, used).copies[0]
        assert (copy.place, copy.holder) == expected
        used.append(copy)
    choice = choose(holdings, PLACES, of_this_training, used)
    assert choice.save is None
    assert choice.lacking == {save(5): [0]}


def test_holders_take_turns() -> None:
    everything = {"memory": [part(3, rank) for rank in range(6)]}
    choice = choose([{}, {}, {}, {}, everything, everything], PLACES, of_this_training)
    assert [copy.holder for copy in choice.copies] == [4, 5, 4, 5, 4, 5]


@given(st.lists(st.dictionaries(st.sampled_from(PLACES), st.lists(st.builds(part, st.just(1), st.integers(0, 5))))))
def test_each_part_of_a_save_is_read_once_from_its_cheapest_place(holdings: list[Holding]) -> None:
    copies = choose_parts(holdings, PLACES, save(1)).copies
    everything = [(place, each) for holding in holdings for place, parts in holding.items() for each in parts]
    assert [copy.part for copy in copies] == sorted({each for _, each in everything})
    for copy in copies:
        places = [place for place, each in everything if each == copy.part]
        assert copy.place == min(places, key=PLACES.index)
        assert copy.part in holdings[copy.holder][copy.place]


parts = st.builds(part, st.integers(1, 4), st.integers(0, 3))
holdings = st.dictionaries(st.sampled_from(PLACES), st.lists(parts, unique=True, max_size=8))


@given(st.lists(holdings, min_size=1, max_size=4), st.data())
def test_never_a_mixture_of_steps(ranks: list[Holding], data: st.DataObject) -> None:
    everything = [
        Copy(place, holder, each)
        for holder, holding in enumerate(ranks)
        for place, found in holding.items()
        for each in found
    ]
    unusable = set(data.draw(st.lists(st.sampled_from(everything), unique=True))) if everything else set()
    choice = choose(ranks, PLACES, of_this_training, unusable)
    usable = {copy for copy in everything if copy not in unusable and copy.part.part < len(ranks)}

    def is_whole(each: SaveId) -> bool:
        return {copy.part.part for copy in usable if copy.part.save == each} == set(range(len(ranks)))

    whole = {copy.part.save for copy in usable if is_whole(copy.part.save)}
    assert choice.save == max(whole, default=None)
    newest = max(whole, default=save(0))
    assert set(choice.lacking) == {copy.part.save for copy in usable if copy.part.save > newest}
    if choice.save is not None:
        assert [copy.part for copy in choice.copies] == [PartId(choice.save, rank) for rank in range(len(ranks))]
        assert set(choice.copies) <= usable
