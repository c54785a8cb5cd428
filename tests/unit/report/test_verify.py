"""Test the comparison of two runs."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import tests
from checkpointless.cli.command_line import main
from checkpointless.observability.report.verify import Difference, Quantity, _StepPlace, compare
from checkpointless.observability.telemetry.steps import (
    Recording,
    StepLog,
    StepRecord,
    ValidationRecord,
    read_steps,
)

Recorded = dict[int, list[StepRecord]]
Names = tuple[tuple[str, ...], ...]


def run(ranks: int, steps: int) -> Recorded:
    return {
        rank: [StepRecord(step, (rank + step / 7).hex(), f"{rank}:{step}") for step in range(1, steps + 1)]
        for rank in range(ranks)
    }


runs = st.builds(run, st.integers(1, 4), st.integers(1, 8))


def with_own(name: str, *digests: str) -> Recorded:
    return {0: [replace(record, own={name: each}) for record, each in zip(run(1, len(digests))[0], digests)]}


@pytest.mark.parametrize("name", ["random stream numpy", "Speed.began"])
def test_rank_local_state_that_differs_from_the_first_step_on_is_not_compared(name: str) -> None:
    verdict = compare(with_own(name, "a", "b"), with_own(name, "c", "d"))
    assert verdict.equal, verdict.sentence
    assert ("Speed.began (from the first step on)" in verdict.sentence) is (name == "Speed.began")
    assert not compare({0: []}, with_own(name, "a")).equal, "no step of one of them"
    verdict = compare(with_own(name, "a", "b"), with_own(name, "a", "d"))
    assert verdict.difference is not None
    assert (verdict.difference.step, verdict.difference.quantity) == (2, Quantity.OWN)


def test_an_attribute_that_is_no_plain_data_in_one_run_is_not_compared() -> None:
    """Such as one that is None until it is made: after a fault it is None again until then."""
    verdict = compare(with_own("module.reduction", "a", "", "a"), with_own("module.reduction", "a", "b", "a"))
    assert verdict.equal, verdict.sentence
    verdict = compare(with_own("module.reduction", "", "", "a"), with_own("module.reduction", "a", "b", "c"))
    assert verdict.difference is not None
    assert verdict.difference.step == 3


def test_a_step_that_was_lost_and_made_again_is_compared() -> None:
    """With the other run, and with what it was before."""
    calm, rough = run(2, 5), run(2, 5)
    rough[1].insert(4, rough[1][3])
    verdict = compare(calm, rough, gone_back=(frozenset(), frozenset({4})))
    assert verdict.equal, verdict.sentence
    assert verdict.made_again == (_StepPlace("B", 1, 4),)
    assert verdict.sentence.endswith("bit by bit; gone back, and made again: steps 4 on rank 1 of run B")
    assert not compare(calm, rough).equal
    assert not compare(calm, rough, gone_back=(frozenset({4}), frozenset())).equal, "the other run went back"
    rough[1][3] = replace(rough[1][3], loss=(0.5).hex())
    verdict = compare(calm, rough, gone_back=(frozenset(), frozenset({4})))
    assert not verdict.equal
    assert "loss of step 4 on rank 1 differs" in verdict.sentence


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


def test_nothing_recorded_is_not_equal() -> None:
    assert not compare({}, {}).equal
    assert compare({0: []}, {}).sentence == "not equal: no step is in both runs"


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
    for verdict, which in ((compare(repeated, steps), ("A",)), (compare(repeated, repeated), ("A", "B"))):
        assert not verdict.equal
        assert verdict.repeated == tuple(_StepPlace(run, rank, again.step) for run in which)
        assert "repeated steps" in verdict.sentence


@given(runs, st.data())
def test_a_step_that_is_missing_is_never_equal(steps: Recorded, data: st.DataObject) -> None:
    rank = data.draw(st.sampled_from(sorted(steps)))
    lost = data.draw(st.sampled_from(steps[rank]))
    short = {**steps, rank: [record for record in steps[rank] if record is not lost]}
    verdict = compare(steps, short)
    assert not verdict.equal
    assert verdict.missing == (_StepPlace("B", rank, lost.step),)


def test_numbers_between_two_fits_are_not_missed() -> None:
    """A second fit of a block that goes on with a trainer's steps leaves as many numbers out."""
    fits = {0: [StepRecord(step, "0x0.0p+0", "p", fit=1 + (step > 4)) for step in (1, 2, 3, 4, 10, 11, 12)]}
    assert compare(fits, fits).equal
    torn = {0: [record for record in fits[0] if record.step != 11]}
    assert compare(fits, torn).missing == (_StepPlace("B", 0, 11),)


EXTRAS: dict[str, Any] = dict(
    buffers="b",
    lr=((0.1).hex(), (0.2).hex()),
    loss_scale=("scale=0x1.0p+16",),
    callbacks={"Average": "1", "EarlyStopping{'monitor': 'val_loss'}": "2"},
    module="m",
    data="d",
)


def recording(validated: tuple[int, ...] = (2, 4), checkpoints: Names = (("step=2", "step=4"),)) -> Recording:
    """Make up a recording of two ranks with all that can be recorded."""
    records = {rank: [replace(record, **EXTRAS) for record in made] for rank, made in run(2, 4).items()}
    validations = [ValidationRecord(step, {"val_loss": (1.5).hex()}, {"Average": "1"}) for step in validated]
    return Recording(records, {0: validations, 1: validations}, checkpoints)


def changed_at(step: int, rank: int, **changes: Any) -> Recording:
    found = recording()
    found[rank] = [replace(record, **changes) if record.step >= step else record for record in found[rank]]
    return found


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"buffers": "c"}, "buffers"),
        ({"lr": ((0.1).hex(), (0.3).hex())}, "learning rates"),
        ({"loss_scale": None}, "loss scale"),
        ({"module": "n"}, "state of the module"),
        ({"data": "e"}, "state of the data module"),
        ({"callbacks": {**EXTRAS["callbacks"], "Average": "2"}}, "state of callback Average"),
        ({"callbacks": {"Average": "1"}}, "state of callback EarlyStopping{'monitor': 'val_loss'}"),
    ],
)
def test_the_sentence_names_the_first_thing_that_differs(changes: dict[str, Any], says: str) -> None:
    other = changed_at(3, 1, **changes)
    for verdict in (compare(recording(), other), compare(other, recording())):
        assert verdict.sentence == f"not equal: {says} of step 3 on rank 1 differs"
        assert verdict.difference is not None
        assert (verdict.difference.step, verdict.difference.rank) == (3, 1)


def test_validations_are_compared_by_what_they_ended_with() -> None:
    other = recording()
    kept = other.validations[0]
    other.validations = {0: kept, 1: [ValidationRecord(2, {"val_loss": (1.75).hex()}), kept[1]]}
    verdict = compare(recording(), other)
    assert verdict.sentence == "not equal: val_loss of the validation after step 2 on rank 1 differs, by 0.25"
    changed = [replace(each, callbacks={"Average": "2"}) for each in kept]
    other.validations = {0: changed, 1: changed}
    says = "state of callback Average of the validation after step 2 on rank 0"
    assert says in compare(other, recording()).sentence


def test_a_validation_that_is_missing_makes_runs_unequal() -> None:
    fewer = compare(recording(validated=(4,)), recording())
    assert fewer.missing_validations == tuple(_StepPlace("A", rank, 2) for rank in (0, 1))
    assert "missing validations after steps: 2 on rank 0 of run A" in fewer.sentence
    assert not compare(recording(), recording(validated=())).equal


def test_a_validation_made_twice_is_equal_only_with_the_same_results() -> None:
    more = compare(recording(), recording(validated=(2, 2, 4)))
    assert more.equal
    assert more.again == tuple(_StepPlace("B", rank, 2) for rank in (0, 1))
    again = "validated again, with the same results, after steps: 2 on rank 0 of run B"
    assert more.sentence.endswith(f"bit by bit; {again}, 2 on rank 1 of run B")
    other = recording(validated=(2, 2, 4))
    first, *rest = other.validations[1]
    for changed in (replace(first, metrics={"val_loss": (0.5).hex()}), replace(first, callbacks={"Average": "2"})):
        other.validations = {**other.validations, 1: [changed, *rest]}
        verdict = compare(recording(), other)
        assert not verdict.equal
        assert verdict.repeated_validations == (_StepPlace("B", 1, 2),)
        repeated = "not equal: repeated validations of different results after steps: 2 on rank 1 of run B"
        assert verdict.sentence == f"{repeated}; {again}"


def test_a_checkpoint_that_only_one_run_has_is_named() -> None:
    other = recording(checkpoints=(("step=2", "step=4", "step=4-last"),))
    assert compare(recording(), other).sentence == ("not equal: checkpoint step=4-last at the end is in run B only")
    assert "is in run A only" in compare(recording(), recording(checkpoints=((),))).sentence
    assert "is in run A only" in compare(recording(), recording(checkpoints=())).sentence


def test_what_an_older_recording_lacks_is_not_compared_and_said() -> None:
    old = Recording(run(2, 4), {}, None)
    assert compare(old, old).sentence == "equal: 4 steps on 2 ranks, bit by bit"
    verdict = compare(old, recording())
    assert verdict.equal
    for name in ("buffers", "learning rates", "state of callback Average", "validations", "checkpoints"):
        assert f"{name} (only in run B)" in verdict.sentence
    swapped = tuple(text.replace("run B", "run A") for text in verdict.not_compared)
    assert compare(recording(), old).not_compared == swapped


def test_what_is_recorded_is_read(tmp_path: Path) -> None:
    log = StepLog(tmp_path, 0)
    log.record(1, 0.5, "p", **EXTRAS)
    log.record(2, 0.25, "q")
    log.record_validation(2, {"val_loss": 1.5}, {"Average": "1"})
    log.record_checkpoints([["b", "a"]])
    log.record_checkpoints([["b", "a", "c"], []])
    found = read_steps(tmp_path)
    assert found == {0: [StepRecord(1, (0.5).hex(), "p", **EXTRAS), StepRecord(2, (0.25).hex(), "q")]}
    assert found.validations == {0: [ValidationRecord(2, {"val_loss": (1.5).hex()}, {"Average": "1"})]}
    assert found.checkpoints == (("a", "b", "c"), ())
    (tmp_path / "steps" / "validation-rank-0.jsonl").write_text('{"step":2,"metrics":{},"callbacks":{}}\n{"step":')
    StepLog(tmp_path, 0).record_validation(4, {}, {})
    assert [record.step for record in read_steps(tmp_path).validations[0]] == [2, 4]


RUNS = Path(tests.__file__).parent / "recorded_runs"


def test_verify_compares_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(RUNS / "calm"), str(RUNS / "rough")]) == 0
    assert "equal: 6 steps on 2 ranks, bit by bit" in capsys.readouterr().out


def test_report_reads_incidents_levels_and_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(RUNS / "rough"), "--json", "-"]) == 0
    incidents = json.loads(capsys.readouterr().out)["incidents"]
    keys = ("how", "rung", "resumed_after", "sources", "outcome")
    found = [[each[key] for key in keys] for each in incidents]
    assert found == [["exception", "in-process", 1, [], "resumed"], ["SIGKILL", "process", 4, [1], "resumed"]]
    assert [round(each["headline_s"], 2) for each in incidents] == [0.23, 0.71]
    assert all(sum(each["tiles_s"].values()) == pytest.approx(each["headline_s"]) for each in incidents)
