"""A state is taken apart and put together again, and what cannot be stored safely is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.replication.parts import Content, PartId, SaveId
from checkpointless.state.serialization.state_tree import StateTreeError
from tests.ranks.local_checkpoint_ranks import bits


@pytest.mark.parametrize(
    "tree", [("tensor",), (0, "tensor"), ("a", "tuple"), {"t": "tensor", "v": 0}, [(torch.ones(2), "tensor")]]
)
def test_what_looks_like_a_reference_to_a_tensor_is_none(tree: Any) -> None:
    assert bits(Content.of(tree).state()) == bits(tree)


class Sharded(torch.Tensor):
    """Represents a tensor that is more than its memory, as a DTensor is."""


@pytest.mark.parametrize(
    "intruder",
    [
        object(),
        torch.ones(2).to_sparse(),
        torch.ones(2, device="meta"),
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
        torch.ones(1).as_subclass(Sharded),
    ],
)
def test_what_cannot_be_stored_is_refused_with_its_path(intruder: Any) -> None:
    with pytest.raises(StateTreeError, match=r"state\['callbacks'\]\[1\]\['EMA'\]"):
        Content.of({"callbacks": (0, {"EMA": intruder})})


# --- names --------------------------------------------------------------------------------------------------------

saves = st.builds(SaveId, st.integers(0, 10**12), st.text("0123456789abcdef", min_size=24, max_size=24))


@given(saves, st.integers(0, 10**6))
def test_names_come_back(save: SaveId, part: int) -> None:
    assert SaveId.parse(str(save)) == save
    assert PartId.parse(str(PartId(save, part))) == PartId(save, part)
