"""A copy of a state is equal to it, and nothing that changes reaches it."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import torch
from hypothesis import given

from checkpointless.state.serialization import state_tree
from checkpointless.state.serialization.digest import digest_value
from tests.unit.serialization.trees import Loud, back, same, trees


@given(trees)
def test_a_copy_is_equal_and_has_the_digest(tree: Any) -> None:
    copied = state_tree.copy(tree)
    assert same(copied, tree)
    assert digest_value(copied) == digest_value(tree) == digest_value(back(tree))


def test_nothing_that_changes_reaches_a_copy() -> None:
    tree: dict[str, Any] = {
        "t": torch.zeros(3),
        "l": [np.zeros(2)],
        "d": collections.deque([1]),
        "p": torch.nn.Parameter(torch.ones(1)),
    }
    copied = state_tree.copy(tree)
    tree["t"].add_(1)
    tree["l"][0] += 1
    tree["l"].append(1)
    tree["d"].append(2)
    assert copied["t"].eq(0).all()
    assert len(copied["l"]) == 1
    assert not copied["l"][0].any()
    assert list(copied["d"]) == [1]
    assert type(copied["p"]) is torch.nn.Parameter
    assert copied["p"].requires_grad


def test_unknown_objects_are_copied_if_they_can_be() -> None:
    class Stubborn:
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("no")

    shared = [1]
    known, stubborn = Loud(), Stubborn()
    known.items = shared  # type: ignore[attr-defined]
    copied: list[Any] = state_tree.copy([known, stubborn, shared, known])
    assert copied[0] is copied[3] is not known
    assert copied[0].items is copied[2] is not shared
    assert copied[1] is stubborn
