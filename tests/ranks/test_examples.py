"""Each script of ``examples/`` comes through faults with the same bits, by its diff and no other line."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from checkpointless.faults.ledger import fired
from checkpointless.report.verify import compare
from tests.ranks.jobs import Job, run_job
from tests.ranks.nemo_zygote import ROOT, Zygote

pytestmark = [pytest.mark.ranks, pytest.mark.nemo, pytest.mark.timeout(400)]

EXAMPLES = ROOT / "examples"
FULL = ["train_ddp_full", "train_fsdp2_full"]  # scripts of a real job's size
WITH_DIFF = sorted({path.stem for path in EXAMPLES.glob("*.diff")} - set(FULL))
STEPS, MOST_LINES, MOST_OF_A_SCRIPT = 7, 5, 60
FAULTS = (
    "exception@before_optimizer:rank=1,step=2",
    "sigkill@optimizer:rank=0,step=4",
    "sigkill@between:rank=1,step=5",
)
# Two replicas of two shards, or what the script itself says.
FOUR_RANKS = frozenset(
    {"train_fsdp2_full", "train_hsdp", "train_lightning_hsdp", "train_megatron", "train_lightning"}
)
# Megatron-core trains on GPUs only; --cpu has our platform installed by MegatronTraining.
ON_CPU = "from checkpointless.megatron import cpu_platform\n\ncpu_platform.install()\n"


ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # Accelerate asks for the number of cores else
Undisturbed = Callable[[str], Job]


def ranks_of(name: str) -> int:
    """Return on how many ranks an example is trained."""
    return 4 if name in FOUR_RANKS else 2


def _train(zygote: Zygote, run_dir: Path, script: Path, *faults: str) -> Job:
    args = ("--steps", str(STEPS))
    job = run_job(zygote, run_dir, ranks_of(script.stem), script=str(script), args=args, faults=faults)
    assert job.code == 0, job.story()
    assert fired(job.run_dir) == dict.fromkeys(faults, 1)
    return job


@pytest.fixture(scope="module")
def undisturbed(nemo_zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Return a function for an example's job without faults, which is made once."""

    @cache
    def run(name: str) -> Job:
        return _train(nemo_zygote, tmp_path_factory.mktemp(name) / "run", EXAMPLES / f"{name}.py")

    return run


def printed_by(script: str, args: list[str]) -> str:
    """Run a script in this rank, which torchrun could have started, and return what it prints."""
    sys.argv = [script, *args]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(script, run_name="__main__")
    return said.getvalue()


def _losses(printed: str) -> list[str]:
    return re.findall(r"^step \d+: loss \d+\.\d+$", printed, re.M)


@pytest.mark.parametrize("name", WITH_DIFF)
def test_an_example_comes_through_faults(
    nemo_zygote: Zygote, tmp_path: Path, undisturbed: Undisturbed, name: str
) -> None:
    calm, rough = undisturbed(name), _train(nemo_zygote, tmp_path / "run", EXAMPLES / f"{name}.py", *FAULTS)
    assert [incident.resumed_after for incident in rough.incidents] == [1, 4, 5], rough.story()
    verdict = compare(calm.steps, rough.steps)
    assert verdict.equal, f"{verdict.sentence}\n{rough.story()}"
    assert verdict.steps == STEPS
    assert len({record.loss for record in calm.steps[0]}) == STEPS, "each step has another loss"


def changed_lines(diff: str, sign: str) -> list[str]:
    """Return the lines that a diff adds ("+") or takes out ("-")."""
    return [line[1:] for line in diff.splitlines() if line.startswith(sign) and not line.startswith(sign * 3)]


def stock_script(name: str, folder: Path) -> Path:
    """Write an example without the lines of its diff, which knows nothing of recovery."""
    plain = folder / f"{name}.py"
    plain.write_bytes((EXAMPLES / plain.name).read_bytes())
    back = ["git", "apply", "-R", "--unidiff-zero", "-"]
    diff = (EXAMPLES / f"{name}.diff").read_text()
    subprocess.run(back, cwd=folder, input=diff, text=True, check=True)
    code = plain.read_text().partition("import argparse")[2].lower()
    assert code
    assert "checkpointless" not in code
    assert "wrapper" not in code
    return plain


@pytest.mark.parametrize("name", WITH_DIFF)
def test_without_the_lines_of_its_diff_an_example_is_anybodys_script(
    nemo_zygote: Zygote, tmp_path: Path, undisturbed: Undisturbed, name: str
) -> None:
    """The script to which the diff is applied computes the same."""
    added = changed_lines((EXAMPLES / f"{name}.diff").read_text(), "+")
    assert 0 < len([line for line in added if line.strip()]) <= MOST_LINES
    plain = stock_script(name, tmp_path)
    assert len(plain.read_text().splitlines()) <= MOST_OF_A_SCRIPT

    if name == "train_megatron":
        plain.write_text(ON_CPU + plain.read_text())
    arguments = {"script": str(plain), "args": ["--steps", str(STEPS)]}
    without, *_ = nemo_zygote.run(
        ranks_of(name), "tests.ranks.test_examples:printed_by", arguments, env=ONE_THREAD, limit_s=120.0
    )
    assert _losses(without) == _losses(undisturbed(name).log(0))
    assert len(_losses(without)) == (0 if "lightning" in name else STEPS)


def _full(run_dir: Path, name: str) -> tuple[str, ...]:
    """Return the arguments of a full example: 13 steps or more, a validation and a checkpoint after the tenth."""
    logs = ("--tensorboard", str(run_dir / "tensorboard"))
    if name == "train_ddp_full":
        return ("--epochs", "2", "--checkpoint", str(run_dir / "checkpoint.pt"), *logs)
    return ("--steps", "13", "--checkpoints", str(run_dir / "checkpoints"), *logs)


def _rows(folder: Path, tag: str) -> list[int]:
    """Return the steps that TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder))
    shown.Reload()
    return [each.step for each in shown.Scalars(tag)]


@pytest.mark.parametrize("name", FULL)
def test_a_full_example_comes_through_faults(nemo_zygote: Zygote, tmp_path: Path, name: str) -> None:
    """Faults fall before an update, after a validation in the same step, and kill the rank that logs and saves."""
    faults = (
        "exception@before_optimizer:rank=1,step=3",
        "sigkill@optimizer:rank=0,step=6",
        "exception@before_optimizer:rank=1,step=11",
    )
    jobs = []
    for run_dir, caused in ((tmp_path / "calm", ()), (tmp_path / "rough", faults)):
        script, args = str(EXAMPLES / f"{name}.py"), _full(run_dir, name)
        job = run_job(nemo_zygote, run_dir, ranks_of(name), script=script, args=args, faults=caused, limit_s=180.0)
        assert job.code == 0, job.story()
        assert fired(job.run_dir) == dict.fromkeys(caused, 1)
        jobs.append(job)
    calm, rough = jobs
    verdict = compare(calm.steps, rough.steps)
    assert verdict.equal, f"{verdict.sentence}\n{rough.story()}"
    assert "another batch" not in rough.story()
    assert _rows(rough.run_dir / "tensorboard", "loss") == list(range(1, verdict.steps + 1))
    saved = {"train_ddp_full": "checkpoint.pt", "train_fsdp2_full": "checkpoints/000013/.metadata"}
    assert (rough.run_dir / saved[name]).is_file()


@pytest.mark.parametrize("name", FULL)
def test_without_the_lines_of_its_diff_a_full_example_is_anybodys_script(
    nemo_zygote: Zygote, tmp_path: Path, name: str
) -> None:
    arguments = {"script": str(stock_script(name, tmp_path)), "args": [*_full(tmp_path, name)]}
    said, *_ = nemo_zygote.run(
        ranks_of(name), "tests.ranks.test_examples:printed_by", arguments, env=ONE_THREAD, limit_s=120.0
    )
    assert re.findall(r"^step 10: ", said, re.M)
    assert _rows(tmp_path / "tensorboard", "loss")[-1] >= 13


@pytest.mark.parametrize("name", FULL)
def test_the_page_shows_the_diff_and_says_its_size(name: str) -> None:
    page = (ROOT / "docs" / f"{name.split('_')[1]}.md").read_text()
    diff = (EXAMPLES / f"{name}.diff").read_text()
    assert f"```diff\n{diff}```" in page
    assert f"{len(changed_lines(diff, '+'))} lines in, {len(changed_lines(diff, '-'))} lines out" in page


def test_every_script_has_its_diff() -> None:
    """NeMo's are in the README and in ``docs/nemo-run.md``; the changed lines of Bridge's are marked in it."""
    scripts = {path.stem for path in EXAMPLES.glob("train_*.py")} - {"train_gpt", "train_bridge"}
    assert scripts == {*WITH_DIFF, *FULL}
