"""Test faults in the midst of Bridge's saves, and what a script as users write it ends with."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpointless.faults.ledger import fired
from checkpointless.observability.report.verify import compare
from tests.bridge.recorded import without_streams
from tests.ranks.jobs import Job, run_job
from tests.ranks.nemo_zygote import Zygote

pytestmark = [pytest.mark.ranks, pytest.mark.nemo, pytest.mark.timeout(400)]

SCRIPTS = Path(__file__).parent / "scripts"
EXAMPLE = Path(__file__).parents[2] / "examples" / "train_bridge.py"
STEPS = 6
Run = Callable[..., Job]


@pytest.fixture(scope="module")
def saved(bridge_zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a function that trains with saves, all into folders of their own."""

    def run(breaks: str = "", steps: int = STEPS, folder: Path | None = None, faults: tuple[str, ...] = ()) -> Job:
        run_dir = tmp_path_factory.mktemp("saves") / "run"
        args = [str(steps), f"save={folder or run_dir.parent / 'saved'}", f"break={breaks or 'none::0:0'}"]
        job = run_job(bridge_zygote, run_dir, 4, script=str(SCRIPTS / "train.py"), args=tuple(args), faults=faults)
        assert job.code == 0, job.story()
        return job

    return run


@pytest.fixture(scope="module")
def undisturbed(saved: Run) -> Job:
    return saved()


def contents(folder: Path) -> dict[str, object]:
    """Return what a folder of checkpoints holds: the names of its files, and their bytes where those are data."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = str(path.relative_to(folder))
            found[name] = None
            if path.suffix == ".distcp":
                found[name] = path.read_bytes()
            elif path.name.endswith("train_state.pt"):
                found[name] = {key: value.item() for key, value in torch.load(path).items()}
    return found


@pytest.mark.parametrize(
    "breaks",
    [
        "saved:sigkill:1:4",
        pytest.param("save:exception:2:4", marks=pytest.mark.long),
        pytest.param("saved:exception:0:6", marks=pytest.mark.long),
    ],
)
def test_a_fault_in_a_save(saved: Run, undisturbed: Job, breaks: str) -> None:
    job = saved(breaks)
    job.assert_same(undisturbed.steps)
    assert len(job.incidents) == 1
    expected, found = contents(undisturbed.run_dir.parent / "saved"), contents(job.run_dir.parent / "saved")
    assert found.keys() == expected.keys()
    assert sum(name.endswith(".distcp") for name in found) >= 4 * STEPS // 2
    assert [name for name in found if found[name] != expected[name]] == []


def test_a_training_that_began_with_a_checkpoint(saved: Run, undisturbed: Job, tmp_path: Path) -> None:
    """Its steps are counted on; after a fault the checkpoint that it began with is not asked for again."""
    folder = undisturbed.run_dir.parent / "saved"
    long = saved(steps=10)
    job = saved(steps=10, folder=folder, faults=("sigkill@forward:rank=2,step=7", "exception@data:rank=1,step=9"))
    assert len(job.incidents) == 2
    expected = without_streams(long.steps)
    for rank, records in without_streams(job.steps).items():
        assert [record.step for record in records] == [7, 8, 9, 10]
        assert records == expected[rank][6:]


def test_when_memory_has_lost_the_state_bridge_loads_its_checkpoint(saved: Run, undisturbed: Job) -> None:
    """Rank 2 dies before it can give what it and rank 0 held."""
    job = saved(faults=("sigkill@forward:rank=0,step=4", "sigkill@recovery:rank=2,step=3"))
    verdict = compare(without_streams(undisturbed.steps), without_streams(job.steps))
    assert verdict.difference is None, "what was done again has other bits"
    assert not verdict.missing
    assert {place.step for place in verdict.repeated} == {3}, "it went on from the checkpoint after step 2"


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
        (1, ("exception@backward:rank=1,step=3", "sigkill@optimizer:rank=2,step=5", "sigkill@data:rank=0,step=7")),
        pytest.param(
            2, ("sigkill@forward:rank=3,step=2", "exception@between:rank=1,step=5"), marks=pytest.mark.long
        ),
    ],
)
def test_the_example_through_faults(
    bridge_zygote: Zygote, tmp_path: Path, tp: int, faults: tuple[str, ...]
) -> None:
    args = ("--steps", "8", "--tp", str(tp))
    calm = run_job(bridge_zygote, tmp_path / "calm", 4, script=str(EXAMPLE), args=args)
    job = run_job(bridge_zygote, tmp_path / "run", 4, script=str(EXAMPLE), args=args, faults=faults)
    assert job.code == 0, job.story()
    assert fired(job.run_dir) == dict.fromkeys(faults, 1)
    assert compare(calm.steps, job.steps).equal
