"""Test faults in the midst of Bridge's saves, and what a script as users write it ends with."""

from __future__ import annotations

import ast
import difflib
import re
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from checkpointless.observability.report.verify import Steps, compare
from checkpointless.observability.telemetry.steps import StepRecord
from tests.ranks.jobs import Job, Trainings, TrainingsOf

pytestmark = [pytest.mark.ranks, pytest.mark.nemo, pytest.mark.timeout(400)]


def without_streams(steps: Steps) -> dict[int, list[StepRecord]]:
    """Leave random streams out: Bridge's checkpoints have those of one data-parallel rank for all."""
    return {rank: [replace(record, own=None) for record in records] for rank, records in steps.items()}


def require_same_from_the_checkpoint(calm: Job, job: Job) -> None:
    """Require that a job that lost the state in step 4 went on from the checkpoint after step 2."""
    verdict = compare(without_streams(calm.steps), without_streams(job.steps))
    assert verdict.difference is None, "what was done again has other bits"
    assert not verdict.missing
    assert {place.step for place in verdict.repeated} == {3}


SCRIPT = str(Path(__file__).parent / "scripts" / "train.py")
EXAMPLE = Path(__file__).parents[2] / "examples" / "train_bridge.py"
STEPS = 6
ARGS = (str(STEPS), "save=saved")


def contents(folder: Path) -> dict[str, object]:
    """Return what a folder of checkpoints holds: the names of its files, and their bytes where those are data."""

    def data(path: Path) -> object:
        if path.name.endswith("train_state.pt"):
            return {key: value.item() for key, value in torch.load(path).items()}
        return path.read_bytes() if path.suffix == ".distcp" else None

    return {str(path.relative_to(folder)): data(path) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "breaks",
    [
        "saved:sigkill:1:4",
        pytest.param("save:exception:2:4", marks=pytest.mark.long),
        pytest.param("saved:exception:0:6", marks=pytest.mark.long),
    ],
)
def test_a_fault_in_a_save(trainings: Trainings, breaks: str) -> None:
    job = trainings.rough(4, ARGS, more=(f"break={breaks}",))
    assert len(job.incidents) == 1
    expected, found = (contents(each.run_dir / "saved") for each in (trainings.calm(4, *ARGS), job))
    assert found.keys() == expected.keys()
    assert sum(name.endswith(".distcp") for name in found) >= 4 * STEPS // 2
    assert [name for name in found if found[name] != expected[name]] == []


def test_a_training_that_began_with_a_checkpoint(trainings: Trainings) -> None:
    """Its steps are counted on; after a fault the checkpoint that it began with is not asked for again."""
    begun, long = trainings.run(4, ARGS), trainings.run(4, ("10", "save=saved"))
    faults = ("sigkill@forward:rank=2,step=7", "exception@data:rank=1,step=9")
    job = trainings.run(4, ("10", f"save={begun.run_dir / 'saved'}"), *faults)
    assert len(job.incidents) == 2
    expected = without_streams(long.steps)
    for rank, records in without_streams(job.steps).items():
        assert [record.step for record in records] == [7, 8, 9, 10]
        assert records == expected[rank][6:]


def test_when_memory_has_lost_the_state_bridge_loads_its_checkpoint(trainings: Trainings) -> None:
    """Rank 2 dies before it can give what it and rank 0 held."""
    job = trainings.run(4, ARGS, "sigkill@forward:rank=0,step=4", "sigkill@recovery:rank=2,step=3")
    require_same_from_the_checkpoint(trainings.calm(4, *ARGS), job)


def plain_lines(script: str) -> list[str]:
    """Return the lines of a script without what makes it recover."""
    lines = [line for line in script.splitlines() if not line.endswith("# in place of nothing")]
    return [line.rpartition("# in place of: ")[2] for line in lines]


def test_the_example_is_a_users_script_with_few_lines_changed() -> None:
    script = EXAMPLE.read_text()
    plain = plain_lines(script)
    assert not re.search("checkpointless|HPWrapper", "\n".join(plain).partition('"""\n\n')[2])
    ast.parse("\n".join(plain))
    changed = [line for line in difflib.ndiff(plain, script.splitlines()) if line[:1] in "+-"]
    assert 0 < len(changed) <= 5, changed
    assert len([line for line in plain if line.strip()]) <= 80


@pytest.mark.parametrize(
    ("tp", "faults"),
    [
        ("1", "exception@backward:rank=1,step=3 sigkill@optimizer:rank=2,step=5 sigkill@data:rank=0,step=7"),
        pytest.param("2", "sigkill@forward:rank=3,step=2 exception@between:rank=1,step=5", marks=pytest.mark.long),
    ],
)
def test_the_example_through_faults(trainings_of: TrainingsOf, tp: str, faults: str) -> None:
    trainings_of(str(EXAMPLE)).rough(4, ("--steps", "8", "--tp", tp), *faults.split())
