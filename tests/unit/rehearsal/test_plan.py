"""Test what a rehearsal does: which faults it draws, and in which folders of links its jobs run."""

import os
from pathlib import Path
from typing import Any

import pytest

from checkpointless.faults.spec import FaultKind, FaultPhase, parse
from checkpointless.observability.telemetry.steps import Recording, StepRecord, ValidationRecord
from checkpointless.testing.jobs import _linked_folder
from checkpointless.testing.rehearsal import _Course, _course_of, _draw

OF_UPDATE = {FaultPhase.BEFORE_OPTIMIZER, FaultPhase.OPTIMIZER, FaultPhase.AFTER_OPTIMIZER, FaultPhase.BETWEEN}


def recording(steps: range, *, epoch: int = 0, loop: bool = True, validated: tuple[int, ...] = ()) -> Recording:
    """Return what two ranks recorded, with an epoch of ``epoch`` steps (0: there are none)."""

    def record(step: int) -> StepRecord:
        number = (step - 1) // epoch if epoch else None
        after = step - 1 in validated or None if loop else None
        found: dict[str, Any] = {"callbacks": None if loop else {}, "epoch": number, "validated": after}
        return StepRecord(step, "0x1.0p+0", "digest", buffers="b", **found)

    records = [record(step) for step in steps]
    validations = () if loop else tuple(ValidationRecord(step, {}) for step in validated)
    return Recording({0: records, 1: records}, {0: validations, 1: validations}, None)


def test_a_course_says_where_epochs_and_validations_are_among_the_steps_to_compare() -> None:
    found = _course_of(recording(range(1, 31), epoch=7, validated=(5, 10, 25)), 20)
    assert found == _Course(1, 20, 2, (7, 14), (5, 10), is_lightning=False)
    found = _course_of(recording(range(1, 13), epoch=7, loop=False, validated=(7,)), 20)
    assert found == _Course(1, 12, 2, (7,), (7,), is_lightning=True)


@pytest.mark.parametrize("seed", range(20))
def test_the_first_faults_are_an_exception_a_sigkill_and_those_after_epoch_and_validation(seed: int) -> None:
    course = _Course(1, 20, 3, epoch_ends=(7, 14), validations=(4,), is_lightning=True)
    trials = _draw(course, 6, seed)
    specs = [parse(each.fault) for each in trials]
    assert [spec.kind for spec in specs] == [FaultKind.EXCEPTION, FaultKind.SIGKILL] * 3
    assert [each.after for each in trials] == ["", "", "an epoch's end", "a validation", "", ""]
    assert specs[2].step in (8, 15)
    assert specs[3].step == 5
    assert all(spec.step is not None and 2 <= spec.step < 20 for spec in specs), "a step follows each"
    assert {spec.rank for spec in specs[:3]} == {0, 1, 2}, "each rank has its turn"
    assert len({spec.phase for spec in specs}) == 6
    assert _draw(course, 6, seed) == trials
    assert _draw(course, 3, seed) == trials[:3]


def test_a_loop_of_ones_own_gets_faults_where_it_announces_phases() -> None:
    specs = [parse(each.fault) for each in _draw(_Course(1, 9, 2), 8, 0)]
    assert {spec.phase for spec in specs} == OF_UPDATE
    assert all(not each.after for each in _draw(_Course(1, 9, 2), 8, 0))


def test_three_steps_are_needed() -> None:
    assert [parse(each.fault).step for each in _draw(_Course(5, 7, 1), 2, 0)] == [6, 6]
    with pytest.raises(ValueError, match="at least 3 steps, and this run made 2"):
        _draw(_Course(5, 6, 1), 2, 0)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = tmp_path / "home" / "project"
    (project / "package").mkdir(parents=True)
    (project / "package" / "module.py").write_text("X = 1")
    (project / "checkpoints").mkdir()
    (project / ".git").mkdir()
    (project.parent / "data").mkdir()
    (project.parent / "data" / "rows.bin").write_bytes(b"rows")
    return project


def test_relative_paths_lead_where_they_led(project: Path, tmp_path: Path) -> None:
    twin = _linked_folder(project, tmp_path / "jobs" / "1")
    assert (twin / "package" / "module.py").read_text() == "X = 1"
    assert (Path(os.path.normpath(twin / ".." / "data")) / "rows.bin").read_bytes() == b"rows"
    assert (twin / ".." / "data" / "rows.bin").read_bytes() == b"rows"
    assert (twin / ".git").is_symlink()


def test_what_is_new_is_not_in_the_users_folder(project: Path, tmp_path: Path) -> None:
    twin = _linked_folder(project, tmp_path / "jobs" / "1")
    (twin / "checkpoints" / "last.ckpt").write_text("state")
    (twin / "lightning_logs").mkdir()
    assert sorted(path.name for path in project.iterdir()) == [".git", "checkpoints", "package"]
    assert list((project / "checkpoints").iterdir()) == []


def test_a_job_within_the_folder_does_not_see_itself_without_end(project: Path) -> None:
    jobs = project / "runs" / "rehearsal"
    jobs.mkdir(parents=True)
    twin = _linked_folder(project, jobs / "1")
    assert (twin / "package" / "module.py").is_file()
    assert (twin / "runs").is_symlink()
