"""Test the decision against a brute-force oracle, and in named cases."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.recovery.decide import RankReport, Verdict, decide
from tests.drawn import examples


def report(rank: int, committed: int | None, *parts: tuple[int, ...], **more: Any) -> RankReport:
    """Return the report of a rank that is whole and has applied all it has computed, unless ``more`` says else."""
    return RankReport(rank, committed, **{"ready": False, "torn": False, "parts": parts, **more})


@st.composite
def worlds(draw: st.DrawFn) -> list[RankReport]:
    """Return ranks on a mesh: their parts are replicated along its first, its second, both or no dimensions."""
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    kinds = draw(st.sets(st.sampled_from(["rows", "columns", "all", "one"]), min_size=1))
    reports = []
    for rank in range(rows * columns):
        row, column = divmod(rank, columns)
        whole = {
            "rows": tuple(range(row * columns, (row + 1) * columns)),
            "columns": tuple(range(column, rows * columns, columns)),
            "all": tuple(range(rows * columns)),
            "one": (rank,),
        }
        parts = tuple(dict.fromkeys(whole[kind] for kind in sorted(kinds)))
        committed = draw(st.sampled_from([None, 0, 1, 2, 3]))
        ready = committed is not None and draw(st.booleans())
        torn = committed is not None and draw(st.integers(0, 4)) == 0
        reports.append(RankReport(rank, committed, ready, torn, parts))
    return reports


def reachable_by_anybody(reports: list[RankReport]) -> set[int]:
    """Return by brute force every step for which each part has a rank that is there or can get there."""
    found = set()
    for step in range(6):
        if all(
            any(
                other.rank in group
                and not other.torn
                and other.committed is not None
                and (other.committed == step or (other.ready and other.committed == step - 1))
                for other in reports
            )
            for each in reports
            for group in each.parts
        ):
            found.add(step)
    return found


@examples(150)
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
        assert len(decision.reason.splitlines()) == 1
        return
    assert decision.verdict is Verdict.RESUME
    assert decision.target == max(steps)
    by_rank = {each.rank: each for each in reports}

    def gets_there(rank: int) -> bool:
        each = by_rank[rank]
        return not each.torn and (each.committed == decision.target or rank in decision.redo)

    for rank, each in by_rank.items():
        if rank in decision.refills:
            assert {group for group, _ in decision.parts[rank]} == {*each.parts}
            for group, sources in decision.parts[rank]:
                assert sources == tuple(source for source in group if gets_there(source)) != ()
            united = {source for _, sources in decision.parts[rank] for source in sources}
            assert decision.refills[rank] == tuple(sorted(united))
            assert rank not in decision.redo
        else:
            assert gets_there(rank)
        if rank in decision.redo:
            assert (each.ready, each.torn, each.committed) == (True, False, decision.target - 1)


def test_a_rank_that_voted_redoes_its_update() -> None:
    reports = [
        report(0, 7, (0, 2)),
        report(1, 6, (1, 3), ready=True),
        report(2, 6, (0, 2)),
        report(3, None, (1, 3)),
    ]
    decision = decide(reports, 7)
    assert (decision.target, decision.redo, dict(decision.refills)) == (7, (1,), {2: (0,), 3: (1,)})


@pytest.mark.parametrize("groups", [((0,), (0, 1)), ((0, 1), (1,)), ((0, 2), (1, 3))])
def test_groups_that_contradict_each_other_raise(groups: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="contradict each other"):
        decide([report(rank, 1, group) for rank, group in enumerate(groups)], 1)


ROWS, COLUMNS = ((0, 1), (2, 3)), ((0, 2), (1, 3))


def crossed(*committed: int | None, examples: tuple[str, ...] = (), **more: Any) -> list[RankReport]:
    """Return four ranks on a mesh, of which each holds a row's part and a column's."""
    return [
        report(rank, step, ROWS[rank // 2], COLUMNS[rank % 2], examples=examples, **more)
        for rank, step in enumerate(committed)
    ]


def test_the_part_whose_last_holder_died_is_named() -> None:
    decision = decide(crossed(None, 7, None, 7, examples=("model.0.row", "model.0.column")), 7)
    assert decision.verdict is Verdict.REFUSE
    assert decision.reason == (
        "no living rank holds the shard of ranks 0, 2 (model.0.column); the last committed step was 7"
    )


def on_a_mesh(*committed: int | None, digests: tuple[str, ...] = ()) -> list[RankReport]:
    """Return eight ranks of which two hold the same, and of each part four; it is said only that these agree."""
    first, second = ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 1, 4, 5), (2, 3, 6, 7))
    said: list[tuple[str, ...]] = [(each, "same") for each in digests] or [()] * len(committed)
    return [
        report(rank, step, first[rank // 4], second[rank // 2 % 2], digests=said[rank], reduced=False)
        for rank, step in enumerate(committed)
    ]


def test_what_is_only_said_to_be_the_same_comes_from_a_rank_that_holds_all_or_else_from_all_that_hold_it() -> None:
    first, second = (0, 1, 2, 3), (0, 1, 4, 5)
    assert dict(decide(on_a_mesh(None, *[5] * 7), 5).parts) == {0: ((first, (1,)), (second, (1,)))}
    both = decide(on_a_mesh(None, None, *[5] * 6), 5)
    assert dict(both.parts) == dict.fromkeys((0, 1), ((first, (2, 3)), (second, (4, 5))))
    reduced = [replace(each, reduced=True) for each in on_a_mesh(None, *[5] * 7)]
    assert dict(decide(reduced, 5).parts) == {0: ((first, (1, 2, 3)), (second, (1, 4, 5)))}


def test_digests_of_what_is_only_said_to_be_the_same_are_compared_with_those_that_hold_all() -> None:
    apart = on_a_mesh(*[5] * 8, digests=("a", "a", "b", "b", "c", "c", "c", "c"))
    assert dict(decide(apart, 5).refills) == {}
    assert "differ at step 5" in decide([replace(each, reduced=True) for each in apart], 5).reason
    assert "differ at step 5" in decide(on_a_mesh(*[5] * 8, digests=tuple("abcccccc")), 5).reason
    alone = [replace(each, reduced=False, digests=("a", "b" * each.rank)) for each in crossed(4, 4, 4, 4)]
    assert "differ at step 4" in decide(alone, 4).reason, "where no two ranks hold all, the holders are compared"


def test_a_part_whose_digest_a_majority_contradicts_has_its_rank_filled() -> None:
    everybody = (0, 1, 2, 3)
    reports = [
        report(rank, 5, everybody, COLUMNS[rank % 2], digests=("bad" if rank == 2 else "good", "own"))
        for rank in range(4)
    ]
    assert dict(decide(reports, 5).parts) == {2: ((everybody, (0, 1, 3)), ((0, 2), (0,)))}


def test_two_digests_of_a_part_that_differ_are_refused_with_the_name_of_the_part() -> None:
    reports = [
        replace(each, digests=("same", str(each.rank)), examples=("row", "column")) for each in crossed(4, 4, 4, 4)
    ]
    assert decide(reports, 4).reason.startswith("the replicas of the shard of ranks 0, 2 (column) differ at step 4")


def test_parts_at_different_steps_are_not_mixed() -> None:
    ahead = decide(crossed(6, 6, 6, 7), 7)
    assert (ahead.target, dict(ahead.refills)) == (6, {3: (1, 2)}), "one rank is a step ahead, and goes back"
    assert decide(crossed(6, None, None, 7), 7).reason.endswith("neither group can reach the other's step")


def saving(rank: int, *saves: tuple[int, int, int, bool], committed: int | None = 7, oldest: int = 6) -> RankReport:
    streams = tuple((step, stage) for step in range(oldest, 8) for stage in range(4))
    stages = (0,) if committed is None else tuple(range(4))
    return report(rank, committed, (0, 1), stages=stages, streams=streams, saves=saves)


PENDING = (4, 7, 0, True)


@pytest.mark.parametrize(
    ("first", "other", "stage"),
    [
        (PENDING, saving(1, PENDING), 3),  # all go on with it
        (PENDING, saving(1, committed=None), 0),  # lost with a process
        (PENDING, saving(1), 0),  # who has finished it does not know it any more
        (PENDING, saving(1, (4, 7, 0, False)), 0),  # failed
        ((4, 7, 1, True), saving(1), 1),  # of a validation
        ((4, 6, 0, True), saving(1, committed=None), 3),  # of an earlier step: it stays lost
        (PENDING, saving(1, committed=None, oldest=7), 3),  # its streams are known no longer
    ],
)
def test_what_follows_a_step_is_done_again_for_a_save_that_is_lost(
    first: tuple[int, int, int, bool], other: RankReport, stage: int
) -> None:
    decision = decide([saving(0, first), other], 7)
    assert (decision.target, decision.stage) == (7, stage)


@pytest.mark.parametrize(("jump", "streams"), [(0, ()), (1, ((3, 0),)), (2, ())])
def test_a_rank_that_lost_its_streams_has_those_that_another_keeps_for_it(jump: int, streams: Any) -> None:
    reports = [report(rank, 3, (0, 1), streams=((3, 2),) * rank, saves=((1, 3, 0, True),)) for rank in range(2)]
    keeps: list[list[list[int]]] = [[], [[3, 0]]]
    told = json.loads(json.dumps([{"report": each.to_json(), "keeps": keeps[each.rank]} for each in reports]))
    assert RankReport.gathered(told, jump) == [replace(reports[0], streams=streams), reports[1]]
