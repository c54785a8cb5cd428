"""The examples of a real job's size come through faults with the same bits and log each step once, without NeMo."""

import re
from pathlib import Path
from typing import Any

import pytest

from checkpointless.observability.report.verify import compare
from checkpointless.observability.telemetry.steps import read_steps
from tests.ranks.agent_job import Ended, Job
from tests.ranks.example_diffs import EXAMPLES, FULL, ROOT, changed_lines, ranks_of, stock_script

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

LIMIT_S = 240.0  # on a machine that is busy
# Before an update; the rank that logs and saves is killed; in the step that begins with a validation.
FAULTS = (
    "exception@before_optimizer:rank=1,step=3",
    "sigkill@optimizer:rank=0,step=6",
    "exception@before_optimizer:rank=1,step=11",
)
SAVED = {"train_ddp_full": "checkpoint.pt", "train_fsdp2_full": "checkpoints/000013/.metadata"}


def _train(run_dir: Path, script: Path, *faults: str, record_steps: bool = False) -> Ended:
    """Train 13 steps or more, with a validation and a checkpoint after the tenth."""
    if script.stem == "train_ddp_full":
        args = ["--epochs", "2", "--checkpoint", str(run_dir / "checkpoint.pt")]
    else:
        args = ["--steps", "13", "--checkpoints", str(run_dir / "checkpoints")]
    args += ["--tensorboard", str(run_dir / "tensorboard")]
    # In an interpreter of its own, since the tests' nursery has daemons, which may not start data-loader workers.
    settings: dict[str, Any] = {"fork_here": False, "faults": list(faults), "record_steps": record_steps}
    command = [str(script)] if script.is_relative_to(EXAMPLES) else ["stock.py", str(script)]
    job = Job(run_dir, *command, *args, nproc=ranks_of(script.stem), env=None, **settings)
    return job.end(LIMIT_S)


def _steps_shown(run_dir: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(run_dir / "tensorboard"))
    shown.Reload()
    return [each.step for each in shown.Scalars("loss")]


@pytest.mark.long  # test_examples.py has the small ones
@pytest.mark.parametrize("name", FULL)
def test_a_full_example_comes_through_faults(tmp_path: Path, name: str) -> None:
    pytest.importorskip("tensorboard")
    script, calm, rough = EXAMPLES / f"{name}.py", tmp_path / "calm", tmp_path / "rough"
    _train(calm, script, record_steps=True)
    ended = _train(rough, script, *FAULTS, record_steps=True)
    verdict = compare(read_steps(calm), read_steps(rough))
    assert (rough / SAVED[name]).is_file()
    assert verdict.equal, f"{verdict.sentence}\n{ended.err}"
    assert "another batch" not in ended.out + ended.err
    assert _steps_shown(rough) == _steps_shown(calm) == list(range(1, verdict.steps + 1))


@pytest.mark.long  # test_examples.py has the small ones
@pytest.mark.parametrize("name", FULL)
def test_without_the_lines_of_its_diff_a_full_example_is_anybodys_script(tmp_path: Path, name: str) -> None:
    pytest.importorskip("tensorboard")
    _train(tmp_path / "run", stock_script(name, tmp_path))
    assert _steps_shown(tmp_path / "run")[:13] == list(range(1, 14))


@pytest.mark.parametrize("name", FULL)
def test_pages_name_the_diff_and_its_size(name: str) -> None:
    page = (ROOT / "docs" / f"{name.split('_')[1]}.md").read_text()
    diff = (EXAMPLES / f"{name}.diff").read_text()
    size = (len(changed_lines(diff, "+")), len(changed_lines(diff, "-")))
    stock = len((EXAMPLES / f"{name}.py").read_text().splitlines()) - size[0] + size[1]
    assert f"](../examples/{name}.diff)" in page
    assert f"{size[0]} lines in, {size[1]} lines out, in a script of {stock} lines" in " ".join(page.split())
    (row,) = re.findall(rf"^\|.*{name}\.py.*\|$", (ROOT / "README.md").read_text(), re.M)
    assert f"{size[0]} in, {size[1]} out in [{stock} lines]" in row
