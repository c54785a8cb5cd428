"""Two ends of users' runs are equal only if every bit is."""

import numpy as np
import pytest
import torch

from tests.ranks.users.end import compare_ends, digest, plain

END = {"parameters": {"w": torch.arange(4.0)}, "lr": [0.1, 0.2], "array": np.zeros(2), "step": 3, "pids": [1]}


def changed(**parts: object) -> list[dict[str, object]]:
    return [plain(END), plain({**END, **parts})]


def test_the_same_is_equal() -> None:
    assert compare_ends(changed(), changed()) == []
    assert compare_ends(changed(), changed(pids=[2, 3])) == [], "whoever it was"


@pytest.mark.parametrize(
    "parts",
    [
        {"parameters": {"w": torch.tensor([0.0, 1.0, 2.0, 3.0000002])}},
        {"parameters": {"w": torch.arange(4.0).double()}},
        {"parameters": {"w": torch.arange(4.0).reshape(2, 2)}},
        {"parameters": {"w": torch.arange(4.0), "v": torch.zeros(2)}},
        {"parameters": {}},
        {"lr": [0.1, 0.2 + 2**-50]},
        {"lr": [0.1]},
        {"array": np.array([0.0, -0.0])},
        {"step": 4},
        {"more": 1},
    ],
)
def test_whatever_is_different_is_found(parts: dict[str, object]) -> None:
    (first, *_) = compare_ends(changed(), changed(**parts))
    assert first.rank == 1
    assert first.place[0] == next(iter(parts))


def test_only_the_parts_that_are_asked_for() -> None:
    assert compare_ends(changed(), changed(step=4), parts=["lr"]) == []


def test_ends_of_other_numbers_of_ranks_are_not_compared() -> None:
    with pytest.raises(ValueError, match="2 ranks cannot be compared with 1"):
        compare_ends(changed(), changed()[:1])


def test_a_digest_is_of_the_bytes_of_any_type() -> None:
    one = [torch.ones(3, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bool)]
    assert digest(one) == digest([each.clone() for each in one])
    assert digest(one) != digest([torch.ones(3, dtype=torch.float16), one[1]])
