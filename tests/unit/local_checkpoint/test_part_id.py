"""Names of saves and parts are parsed as they were made."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.local_checkpoint.part_id import PartId, SaveId

saves = st.builds(SaveId, st.integers(0, 10**12), st.text("0123456789abcdef", min_size=24, max_size=24))


@given(saves, st.integers(0, 10**6))
def test_names_come_back(save: SaveId, part: int) -> None:
    assert SaveId.parse(str(save)) == save
    assert PartId.parse(str(PartId(save, part))) == PartId(save, part)


@given(saves, saves)
def test_a_later_iteration_is_a_greater_save(one: SaveId, other: SaveId) -> None:
    if one.iteration != other.iteration:
        assert (one < other) is (one.iteration < other.iteration)


def test_what_is_no_name_is_refused() -> None:
    with pytest.raises(ValueError, match="'part_3' names no part"):
        PartId.parse("part_3")
    with pytest.raises(ValueError, match="'5' names no save"):
        SaveId.parse("5")
