"""Test that state moves between processes over gloo: all dtypes, several holders, several ranks to fill, damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks.nemo_zygote import Zygote
from tests.ranks.transfer_ranks import TENSOR_MB, total_bytes

pytestmark = pytest.mark.ranks
FILL = "tests.ranks.transfer_ranks:fill"
FILL_OBJECTS = "tests.ranks.transfer_ranks:fill_objects"
MB = 1024 * 1024
STRIDED = 64 * 96 * 4  # bytes of a tensor with gaps
# This covers several copies of the skeleton with its 9 MB of bytes, and what gloo and torch take for themselves.
SLACK_MB = 60


def whole(outcome: dict[str, Any]) -> bool:
    return bool(outcome["equal"] and outcome["keys"] and outcome["objects"])


@pytest.mark.parametrize(("world", "destinations"), [(2, [0]), (4, [0]), (4, [0, 1])])
def test_every_bit_key_and_object_arrives(nemo_zygote: Zygote, world: int, destinations: list[int]) -> None:
    outcomes = nemo_zygote.run(world, FILL, {"destinations": destinations})
    for destination in destinations:
        assert whole(outcomes[destination])
        report = outcomes[destination]["report"]
        assert report["bytes"] == total_bytes()
        assert report["kept"] == 0
        assert report["gb_per_s"] == pytest.approx(report["bytes"] / report["seconds"] / 1e9)
        assert report["sources"] == [rank for rank in range(world) if rank not in destinations]
    assert len({outcomes[destination]["report"]["digest"] for destination in destinations}) == 1


def test_what_belongs_where_there_are_gaps_arrives(nemo_zygote: Zygote) -> None:
    outcomes = nemo_zygote.run(2, FILL, {"destinations": [0], "gaps": True})
    assert whole(outcomes[0])


def test_a_bucket_that_two_ranks_want_is_made_once(nemo_zygote: Zygote) -> None:
    one = nemo_zygote.run(2, FILL, {"destinations": [0]})
    two = nemo_zygote.run(3, FILL, {"destinations": [0, 1]})
    assert two[2]["sent"] == one[1]["sent"] > 20


def test_a_damaged_bucket_is_found_when_all_have_arrived(nemo_zygote: Zygote) -> None:
    outcomes = nemo_zygote.run(3, FILL, {"destinations": [0], "damaged": [1]})
    assert outcomes[0]["error"].startswith("1 of ")
    assert outcomes[0]["error"].endswith("buckets arrived damaged from ranks [1, 2]")
    assert abs(outcomes[1]["sent"] - outcomes[2]["sent"]) <= 1, "each sends about half, and waits for nothing more"


@pytest.mark.parametrize(
    ("world", "more", "waits"),
    [
        (2, {"destinations": [0]}, 1),
        (4, {"destinations": [0, 1]}, 1),
        (2, {"destinations": [0], "known": "large"}, 2),  # and once for what is there already
    ],
)
def test_on_a_wire_that_runs_ahead_digests_are_waited_for_once(
    nemo_zygote: Zygote, world: int, more: dict[str, Any], waits: int
) -> None:
    outcomes = nemo_zygote.run(world, FILL, {**more, "ahead": True})
    for rank, outcome in enumerate(outcomes):
        if rank in more["destinations"]:
            assert whole(outcome)
            assert outcome["counts"]["digests"] == waits
        elif world < 3:
            assert outcome["counts"]["digests"] == waits
        assert outcome["counts"]["batches"] < outcome["counts"]["messages"]


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
    assert kept == STRIDED, "only the strided one, in which no bit was flipped"


def test_large_objects_arrive_in_buckets_within_the_budget(nemo_zygote: Zygote) -> None:
    filled, *holders = nemo_zygote.run(3, FILL_OBJECTS, {"count": 16})
    assert filled["equal"]
    assert filled["shared"]
    assert filled["strides"]
    assert filled["types"] == ["ndarray", "float32", "Counter"]
    destination_mb = 16 * TENSOR_MB + 3
    assert filled["report"]["bytes"] == destination_mb * MB + 40 * 999 * 4
    assert filled["grown_mb"] < destination_mb + SLACK_MB
    assert all(holder["grown_mb"] < SLACK_MB for holder in holders)
    first, other = (holder["sent"] for holder in holders)
    assert first > destination_mb * MB > MB > other, "the first holder sends its objects"


@pytest.mark.long  # test_state.py has one; this waits for half a minute
def test_a_holder_killed_in_the_middle_of_large_objects(nemo_zygote: Zygote, tmp_path: Path) -> None:
    meeting = str(tmp_path / "meeting")
    arguments = {"count": 6, "killed": True, "meeting": meeting}
    filled, holder, killed = nemo_zygote.run(3, FILL_OBJECTS, arguments, expendable=(2,))
    assert killed is None
    assert filled["error"]
    assert filled["again"]["equal"]
    assert filled["again"]["report"]["sources"] == [1]
    assert "sent" in holder["again"]


def test_messages_of_several_chunks_reach_every_rank(nemo_zygote: Zygote) -> None:
    length = 3 * MB + 1
    expected = [length, length // 2, length // 3]
    assert nemo_zygote.run(3, "tests.ranks.transfer_ranks:gather", {"length": length}) == [expected] * 3


def test_an_announced_size_is_not_believed(nemo_zygote: Zygote) -> None:
    said = nemo_zygote.run(2, "tests.ranks.transfer_ranks:announce")
    assert said[1].startswith("rank 0 announced a message of 1099511627776 bytes")
