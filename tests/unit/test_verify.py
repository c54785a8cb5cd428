"""Comparing two runs."""

from hypothesis import given
from hypothesis import strategies as st

from checkpointless.telemetry.steps import StepRecord
from checkpointless.telemetry.verify import Difference, Quantity, Run, StepPlace, compare

Recorded = dict[int, list[StepRecord]]


def run(ranks: int, steps: int) -> Recorded:
    return {
        rank: [StepRecord(step, (rank + step / 7).hex(), f"{rank}:{step}") for step in range(1, steps + 1)]
        for rank in range(ranks)
    }


runs = st.builds(run, st.integers(1, 4), st.integers(1, 8))


def test_equal_runs() -> None:
    verdict = compare(run(2, 5), run(2, 5))
    assert verdict.equal
    assert (verdict.difference, verdict.steps, verdict.ranks) == (None, 5, (0, 1))
    assert verdict.sentence == "equal: 5 steps on 2 ranks, bit by bit"


def test_the_first_difference_is_named() -> None:
    other = run(2, 5)
    other[0][3] = StepRecord(4, other[0][3].loss, "other")
    other[1][2] = StepRecord(3, (1 + 3 / 7 + 0.25).hex(), "other")
    verdict = compare(run(2, 5), other)
    assert not verdict.equal
    assert verdict.difference == Difference(3, 1, Quantity.LOSS, (1 + 3 / 7).hex(), (1 + 3 / 7 + 0.25).hex(), 0.25)
    assert verdict.sentence == "not equal: loss of step 3 on rank 1 differs, by 0.25"


def test_one_bit_is_a_difference_and_so_is_the_sign_of_zero() -> None:
    verdict = compare({0: [StepRecord(1, (0.0).hex(), "d")]}, {0: [StepRecord(1, (-0.0).hex(), "d")]})
    assert verdict.difference is not None
    assert verdict.difference.by == 0.0
    assert not verdict.equal


def test_losses_that_are_not_finite_have_no_distance() -> None:
    verdict = compare({0: [StepRecord(1, "nan", "d")]}, {0: [StepRecord(1, "inf", "d")]})
    assert verdict.difference is not None
    assert verdict.difference.by is None
    assert compare({0: [StepRecord(1, "nan", "d")]}, {0: [StepRecord(1, "nan", "d")]}).equal


def test_runs_that_are_short_of_the_same_step_are_not_equal() -> None:
    a, b = run(2, 5), run(2, 5)
    del a[1][2], b[1][2]
    verdict = compare(a, b)
    assert not verdict.equal
    assert verdict.missing == (StepPlace(Run.A, 1, 3), StepPlace(Run.B, 1, 3))
    assert "missing steps: 3 on rank 1 of run A, 3 on rank 1 of run B" in verdict.sentence


def test_a_missing_rank_is_missing_steps() -> None:
    verdict = compare(run(2, 4), run(1, 4))
    assert verdict.missing == tuple(StepPlace(Run.B, 1, step) for step in range(1, 5))
    assert verdict.ranks == (0,)
    assert verdict.sentence.endswith("and 1 more")


def test_nothing_recorded_is_not_equal() -> None:
    assert not compare({}, {}).equal
    assert compare({0: []}, {}).sentence == "not equal: no step is in both runs"


@given(runs)
def test_a_run_equals_itself(steps: Recorded) -> None:
    assert compare(steps, steps).equal


@given(runs, st.data())
def test_any_change_is_found_where_it_is(steps: Recorded, data: st.DataObject) -> None:
    rank = data.draw(st.sampled_from(sorted(steps)))
    index = data.draw(st.integers(0, len(steps[rank]) - 1))
    changed = {key: list(records) for key, records in steps.items()}
    old = changed[rank][index]
    if data.draw(st.booleans()):
        changed[rank][index] = StepRecord(old.step, old.loss, old.params + "!")
    else:
        changed[rank][index] = StepRecord(old.step, (float.fromhex(old.loss) + 1).hex(), old.params)
    for verdict in (compare(steps, changed), compare(changed, steps)):
        assert not verdict.equal
        assert verdict.difference is not None
        assert (verdict.difference.rank, verdict.difference.step) == (rank, old.step)


@given(runs, st.data())
def test_a_step_made_twice_is_never_equal(steps: Recorded, data: st.DataObject) -> None:
    rank = data.draw(st.sampled_from(sorted(steps)))
    again = data.draw(st.sampled_from(steps[rank]))
    repeated = {**steps, rank: [*steps[rank], again]}
    for verdict, which in ((compare(repeated, steps), (Run.A,)), (compare(repeated, repeated), (Run.A, Run.B))):
        assert not verdict.equal
        assert verdict.repeated == tuple(StepPlace(run, rank, again.step) for run in which)
        assert "repeated steps" in verdict.sentence


@given(runs, st.data())
def test_a_step_that_is_missing_is_never_equal(steps: Recorded, data: st.DataObject) -> None:
    rank = data.draw(st.sampled_from(sorted(steps)))
    lost = data.draw(st.sampled_from(steps[rank]))
    short = {**steps, rank: [record for record in steps[rank] if record is not lost]}
    verdict = compare(steps, short)
    assert not verdict.equal
    assert verdict.missing == (StepPlace(Run.B, rank, lost.step),)
