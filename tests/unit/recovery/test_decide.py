"""Test the decision against a brute-force oracle, and in named cases."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpointless.recovery.decide import RankReport, Verdict, decide, reports_of


def report(rank: int, committed: int | None, group: Sequence[int], **more: Any) -> RankReport:
    return RankReport(
        rank, committed, bool(more.get("ready")), bool(more.get("torn")), tuple(group), more.get("digest")
    )


@st.composite
def worlds(draw: st.DrawFn) -> list[RankReport]:
    groups = draw(st.integers(1, 4))
    size = draw(st.integers(1, 3))
    reports = []
    for index in range(groups):
        members = tuple(range(index, groups * size, groups))
        for rank in members:
            committed = draw(st.sampled_from([None, 0, 1, 2, 3]))
            ready = committed is not None and draw(st.booleans())
            torn = committed is not None and draw(st.integers(0, 4)) == 0
            reports.append(RankReport(rank, committed, ready, torn, members))
    return reports


def reachable_by_anybody(reports: list[RankReport]) -> set[int]:
    """Return by brute force every step for which each group has a rank that is there or can get there."""
    found = set()
    for step in range(6):
        if all(
            any(
                other.rank in each.group
                and not other.torn
                and other.committed is not None
                and (other.committed == step or (other.ready and other.committed == step - 1))
                for other in reports
            )
            for each in reports
        ):
            found.add(step)
    return found


@settings(max_examples=400)
@given(worlds(), st.integers(-1, 4))
def test_agrees_with_brute_force(reports: list[RankReport], high_water: int) -> None:
    decision = decide(reports, high_water)
    committed = {each.committed for each in reports if not each.torn}
    steps = reachable_by_anybody(reports) & (committed | {high_water})
    nobody = all(each.committed is None or each.torn for each in reports)
    if nobody and high_water <= 0:
        assert decision.verdict is Verdict.START
        return
    if not steps:
        assert decision.verdict is Verdict.REFUSE
        assert decision.reason
        assert "\n" not in decision.reason
        return
    assert decision.verdict is Verdict.RESUME
    assert decision.target == max(steps)
    by_rank = {each.rank: each for each in reports}

    def gets_there(rank: int) -> bool:
        each = by_rank[rank]
        return not each.torn and (each.committed == decision.target or rank in decision.redo)

    for rank, each in by_rank.items():
        if rank in decision.refills:
            sources = decision.refills[rank]
            assert sources
            assert all(source in each.group and source != rank and gets_there(source) for source in sources)
            assert rank not in decision.redo
        else:
            assert gets_there(rank)
        if rank in decision.redo:
            assert each.ready
            assert not each.torn
            assert each.committed == decision.target - 1


def test_a_killed_rank_is_refilled_from_its_replica() -> None:
    reports = [report(0, 7, (0, 2)), report(1, 7, (1, 3)), report(2, None, (0, 2)), report(3, 7, (1, 3))]
    decision = decide(reports, 7)
    assert (decision.verdict, decision.target, dict(decision.refills)) == (Verdict.RESUME, 7, {2: (0,)})


def test_a_rank_that_voted_redoes_its_update() -> None:
    reports = [
        report(0, 7, (0, 2)),
        report(1, 6, (1, 3), ready=True),
        report(2, 6, (0, 2)),
        report(3, None, (1, 3)),
    ]
    decision = decide(reports, 7)
    assert decision.target == 7
    assert decision.redo == (1,)
    assert dict(decision.refills) == {2: (0,), 3: (1,)}


def test_a_step_that_nobody_committed_is_not_completed() -> None:
    reports = [report(0, 6, (0, 2), ready=True), report(1, 6, (1, 3), ready=True)]
    reports += [report(2, 6, (0, 2)), report(3, None, (1, 3))]
    assert decide(reports, 6).target == 6
    assert decide(reports, 7).target == 7, "a rank that died since had committed it"


def test_a_torn_rank_is_refilled_and_is_no_source() -> None:
    reports = [report(0, 6, (0, 1), torn=True), report(1, 7, (0, 1))]
    assert dict(decide(reports, 7).refills) == {0: (1,)}


def test_both_holders_gone_is_refused_by_name() -> None:
    reports = [report(0, None, (0, 2)), report(1, 5, (1, 3)), report(2, None, (0, 2)), report(3, 5, (1, 3))]
    decision = decide(reports, 5)
    assert decision.verdict is Verdict.REFUSE
    assert "ranks 0, 2" in decision.reason
    assert "5" in decision.reason


def test_nothing_held_after_commits_never_starts_over() -> None:
    assert decide([report(rank, None, (0, 1)) for rank in range(2)], 3).verdict is Verdict.REFUSE
    assert decide([report(rank, None, (0, 1)) for rank in range(2)], 0).verdict is Verdict.START


def test_groups_on_both_sides_of_a_commit_are_refused() -> None:
    decision = decide([report(0, 7, (0,)), report(1, 6, (1,))], 7)
    assert decision.verdict is Verdict.REFUSE
    assert "step 7" in decision.reason
    assert "step 6" in decision.reason


def test_the_odd_replica_out_is_refilled() -> None:
    group = (0, 1, 2)
    reports = [report(rank, 4, group, digest=digest) for rank, digest in enumerate("aba")]
    assert dict(decide(reports, 4).refills) == {1: (0, 2)}


def test_two_replicas_that_differ_are_refused() -> None:
    reports = [report(rank, 4, (0, 1), digest=digest) for rank, digest in enumerate("ab")]
    assert "differ at step 4" in decide(reports, 4).reason


@pytest.mark.parametrize("groups", [((0,), (0, 1)), ((0, 1), (1,)), ((0, 2), (1, 3))])
def test_groups_that_contradict_each_other_raise(groups: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="partition"):
        decide([report(rank, 1, group) for rank, group in enumerate(groups)], 1)


def test_two_reports_of_one_rank_raise() -> None:
    with pytest.raises(ValueError, match="one rank"):
        decide([report(0, 1, (0,)), report(0, 1, (0,))], 1)


def test_order_of_reports_does_not_matter() -> None:
    reports = [
        report(0, 7, (0, 2)),
        report(1, 6, (1, 3), ready=True),
        report(2, 6, (0, 2)),
        report(3, None, (1, 3)),
    ]
    decisions = {repr(decide(list(order), 7)) for order in itertools.permutations(reports)}
    assert len(decisions) == 1


def saving(rank: int, *saves: tuple[int, int, int, bool], committed: int | None = 7, oldest: int = 6) -> RankReport:
    streams = tuple((step, stage) for step in range(oldest, 8) for stage in range(4))
    stages = (0,) if committed is None else tuple(range(4))
    return RankReport(
        rank, committed, False, False, (0, 1), stages=stages, streams=streams, saves=saves if saves else ()
    )


PENDING = (4, 7, 0, True)


def test_a_save_that_all_go_on_with_leaves_the_stage() -> None:
    assert decide([saving(0, PENDING), saving(1, PENDING)], 7).stage == 3


@pytest.mark.parametrize(
    "other",
    [saving(1, committed=None), saving(1), saving(1, (4, 7, 0, False))],
    ids=["new-process", "has-finished-it", "failed"],
)
def test_what_follows_a_step_is_done_again_for_a_save_that_is_lost(other: RankReport) -> None:
    decision = decide([saving(0, PENDING), other], 7)
    assert (decision.target, decision.stage) == (7, 0)


def test_a_save_of_a_validation_that_is_lost_does_not_have_more_done_again() -> None:
    assert decide([saving(0, (4, 7, 1, True)), saving(1)], 7).stage == 1


def test_a_save_of_an_earlier_step_that_is_lost_stays_lost() -> None:
    assert decide([saving(0, (4, 6, 0, True)), saving(1, committed=None)], 7).stage == 3


def test_nothing_is_done_again_with_streams_that_are_known_no_longer() -> None:
    assert decide([saving(0, PENDING), saving(1, committed=None, oldest=7)], 7).stage == 3


@pytest.mark.parametrize(("jump", "streams"), [(0, ()), (1, ((3, 0),)), (2, ())])
def test_a_rank_that_lost_its_streams_has_those_that_another_keeps_for_it(jump: int, streams: Any) -> None:
    reports = [
        RankReport(rank, 3, False, False, (0, 1), streams=((3, 2),) if rank else (), saves=((1, 3, 0, True),))
        for rank in range(2)
    ]
    keeps: list[list[list[int]]] = [[], [[3, 0]]]
    told = json.loads(json.dumps([{"report": asdict(each), "keeps": keeps[each.rank]} for each in reports]))
    assert reports_of(told, jump) == [replace(reports[0], streams=streams), reports[1]]
