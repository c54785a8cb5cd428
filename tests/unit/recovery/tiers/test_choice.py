"""The copies that a recovery is made of: one step for all ranks, the newest that is whole, the cheapest copies."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from checkpointless.local_checkpoint.part_id import PartId, SaveId
from checkpointless.recovery.tiers.choice import Copy, Holding, choose
from checkpointless.telemetry.event_names import LIVING

TIERS = ("memory", "local", "shared")


def save(step: int) -> SaveId:
    return SaveId(step, "0" * 24)


def part(step: int, rank: int) -> PartId:
    return PartId(save(step), rank)


def of_this_training(_: SaveId) -> bool:
    return True


def test_a_lost_rank_is_filled_from_its_neighbor_and_the_others_keep_their_state() -> None:
    holdings = [
        Holding(save(7), {"memory": [part(7, 0), part(7, 1)]}),
        Holding(None),
        Holding(save(7), {"memory": [part(7, 2)]}),
    ]
    choice = choose(holdings, TIERS, of_this_training)
    assert choice.save == save(7)
    assert choice.copies == (
        Copy(LIVING, 0, part(7, 0)),
        Copy("memory", 0, part(7, 1)),
        Copy(LIVING, 2, part(7, 2)),
    )


def test_all_go_back_to_a_step_that_everybody_has() -> None:
    holdings = [
        Holding(save(8), {"memory": [part(7, 0), part(7, 1), part(8, 0)]}),
        Holding(None, {}),
    ]
    choice = choose(holdings, TIERS, of_this_training)
    assert choice.save == save(7)
    assert {copy.tier for copy in choice.copies} == {"memory"}


def test_a_damaged_copy_is_replaced_by_the_next_one_and_then_by_the_next_tier() -> None:
    holdings = [
        Holding(None, {"memory": [part(5, 0)], "shared": [part(5, 0)]}),
        Holding(save(5), {"memory": [part(5, 0)]}),
    ]
    used: list[Copy] = []
    for expected in (("memory", 0), ("memory", 1), ("shared", 0)):
        copy = choose(holdings, TIERS, of_this_training, used).copies[0]
        assert (copy.tier, copy.holder) == expected
        used.append(copy)
    choice = choose(holdings, TIERS, of_this_training, used)
    assert choice.save is None
    assert choice.reason == "no tier (memory, local, shared) has the state of rank 0 after step 5"


def test_holders_take_turns() -> None:
    lost = [Holding(None)] * 4
    everything = Holding(save(3), {"memory": [part(3, rank) for rank in range(6)]})
    choice = choose([*lost, everything, everything], TIERS, of_this_training)
    assert [copy.holder for copy in choice.copies] == [4, 5, 4, 5, 4, 5]


def test_saves_of_another_training_are_left_out() -> None:
    holdings = [Holding(None, {"local": [part(9, 0), part(4, 0)]})]
    assert choose(holdings, TIERS, lambda each: each.iteration < 9).save == save(4)
    assert choose(holdings, TIERS, lambda _: False).reason.startswith("no tier (memory, local, shared) has a copy")


parts = st.builds(part, st.integers(1, 4), st.integers(0, 3))
holdings = st.builds(
    Holding,
    st.none() | st.builds(save, st.integers(1, 4)),
    st.dictionaries(st.sampled_from(TIERS), st.lists(parts, unique=True, max_size=8)),
)


@given(st.lists(holdings, min_size=1, max_size=4), st.data())
def test_never_a_mixture_of_steps(ranks: list[Holding], data: st.DataObject) -> None:
    everything = [
        Copy(tier, holder, each)
        for holder, holding in enumerate(ranks)
        for tier, found in holding.parts.items()
        for each in found
    ]
    unusable = set(data.draw(st.lists(st.sampled_from(everything), unique=True))) if everything else set()
    choice = choose(ranks, TIERS, of_this_training, unusable)
    usable = {copy for copy in everything if copy not in unusable and copy.part.part < len(ranks)}
    usable |= {
        Copy(LIVING, rank, PartId(holding.living, rank))
        for rank, holding in enumerate(ranks)
        if holding.living is not None
    }

    def is_whole(each: SaveId) -> bool:
        return {copy.part.part for copy in usable if copy.part.save == each} == set(range(len(ranks)))

    whole = {copy.part.save for copy in usable if is_whole(copy.part.save)}
    assert choice.save == max(whole, default=None)
    assert bool(choice.reason) is not bool(whole)
    if choice.save is not None:
        assert [copy.part for copy in choice.copies] == [PartId(choice.save, rank) for rank in range(len(ranks))]
        assert set(choice.copies) <= usable
