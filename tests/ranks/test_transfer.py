"""State moved between real processes over gloo: every dtype, several holders, several ranks to fill, damage."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks.nemo_zygote import Zygote
from tests.ranks.transfer_ranks import total_bytes

pytestmark = pytest.mark.ranks
FILL = "tests.ranks.transfer_ranks:fill"


def whole(outcome: dict[str, Any]) -> bool:
    return bool(outcome["equal"] and outcome["keys"] and outcome["objects"])


@pytest.mark.parametrize(("world", "destinations"), [(2, [0]), (4, [0]), (4, [0, 1])])
def test_every_bit_key_and_object_arrives(nemo_zygote: Zygote, world: int, destinations: list[int]) -> None:
    outcomes = nemo_zygote.run(world, FILL, {"destinations": destinations})
    for destination in destinations:
        assert whole(outcomes[destination])
        report = outcomes[destination]["report"]
        assert report["bytes"] == total_bytes()
        assert report["kept"] == report["fetched_again"] == 0
        assert report["sources"] == [rank for rank in range(world) if rank not in destinations]
    assert len({outcomes[destination]["report"]["digest"] for destination in destinations}) == 1


def test_a_bucket_that_two_ranks_want_is_made_once(nemo_zygote: Zygote) -> None:
    one = nemo_zygote.run(2, FILL, {"destinations": [0]})
    two = nemo_zygote.run(3, FILL, {"destinations": [0, 1]})
    assert two[2]["sent"] == one[1]["sent"] > 20


def test_a_damaged_bucket_is_fetched_again_from_another_holder(nemo_zygote: Zygote) -> None:
    outcomes = nemo_zygote.run(3, FILL, {"destinations": [0], "damaged": [1]})
    assert whole(outcomes[0])
    assert outcomes[0]["report"]["fetched_again"] == 1
    assert outcomes[2]["sent"] - outcomes[1]["sent"] in (0, 1, 2)  # about half of all, and one of the other's


def test_the_only_holder_sends_a_damaged_bucket_again(nemo_zygote: Zygote) -> None:
    outcomes = nemo_zygote.run(2, FILL, {"destinations": [0], "damaged": [1]})
    assert whole(outcomes[0])
    assert outcomes[0]["report"]["fetched_again"] == 1


def test_what_stays_damaged_is_refused(nemo_zygote: Zygote) -> None:
    outcomes = nemo_zygote.run(2, FILL, {"destinations": [0], "damaged": [1], "damage_always": True})
    assert "stayed damaged after 4 tries" in outcomes[0]["error"]


def test_what_a_rank_has_already_is_not_sent(nemo_zygote: Zygote) -> None:
    outcomes = nemo_zygote.run(2, FILL, {"destinations": [0], "known": "large"})
    assert whole(outcomes[0])
    report = outcomes[0]["report"]
    assert report["kept"] == 4 * 100_003
    assert report["bytes"] == total_bytes() - report["kept"]


def test_what_a_rank_has_that_is_stale_is_sent(nemo_zygote: Zygote) -> None:
    outcomes = nemo_zygote.run(2, FILL, {"destinations": [0], "known": "stale"})
    assert whole(outcomes[0])
    kept = outcomes[0]["report"]["kept"]
    assert kept == 64 * 96 * 4, "only the strided one, in which no bit was flipped"
