"""A user's NeMo script with our three lines, and a recipe of NeMo's that NeMo-Run runs, come through faults."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from checkpointless.faults.ledger import fired
from checkpointless.observability.report.incidents import Outcome
from checkpointless.observability.telemetry.steps import read_steps
from tests.ranks.jobs import Job, assert_same, run_job
from tests.ranks.nemo_zygote import ROOT, Zygote

pytestmark = [pytest.mark.ranks, pytest.mark.nemo]

RECIPE = "nemo_run_recipe"
STEPS = 6
FAULTS = ("exception@backward:rank=1,step=3", "sigkill@forward:rank=0,step=4")


def _train(
    zygote: Zygote, run_dir: Path, name: str, *options: str, faults: tuple[str, ...] = (), nproc: int = 2
) -> Job:
    script = str(ROOT / "examples" / f"{name}.py")
    args = ("--steps", str(STEPS), *options, *(("--dir", str(run_dir / "nemo")) if name == RECIPE else ()))
    return run_job(zygote, run_dir, nproc, script=script, args=args, faults=faults)


@pytest.mark.parametrize(
    ("name", "nproc", "options"),
    [
        pytest.param("train_gpt", 2, (), id="script"),
        pytest.param("train_gpt", 4, ("--tensor-parallel", "2"), id="script-tp2", marks=pytest.mark.long),
        pytest.param(RECIPE, 2, (), id="recipe"),
        pytest.param(RECIPE, 2, ("--lora",), id="recipe-lora", marks=pytest.mark.long),
    ],
)
def test_every_object_is_made_once_more_and_every_bit_is_the_same(
    nemo_zygote: Zygote, tmp_path: Path, name: str, nproc: int, options: tuple[str, ...]
) -> None:
    calm = _train(nemo_zygote, tmp_path / "calm", name, *options, nproc=nproc)
    assert calm.incidents == []
    assert all([each.step for each in calm.steps[rank]] == list(range(1, STEPS + 1)) for rank in range(nproc))
    rough = _train(nemo_zygote, tmp_path / "rough", name, *options, nproc=nproc, faults=FAULTS)
    assert [incident.outcome for incident in rough.incidents] == [Outcome.RESUMED, Outcome.RESUMED]
    assert [incident.respawned for incident in rough.incidents] == [(), (0,)]
    rough.assert_same(calm.steps, STEPS)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_an_executor_of_nemo_run_launches_it_and_an_exception_changes_no_bit(
    nemo_zygote: Zygote, tmp_path: Path
) -> None:
    fault = "exception@backward:rank=1,step=3"
    run_dir = tmp_path / "executor"
    environment = {
        "CHECKPOINTLESS_CPU": "1",
        "CHECKPOINTLESS_RUN_DIR": str(run_dir),
        "CHECKPOINTLESS_RECORD_STEPS": "1",
        "CHECKPOINTLESS_FAULTS": json.dumps([fault]),
        "OMP_NUM_THREADS": "1",
    }
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # the executor looks for torchrun there
    command = [sys.executable, "-m", "tests.ranks.executor_job", str(tmp_path / "nemo"), "2", str(STEPS)]
    with subprocess.Popen(
        [*command, *(f"{key}={value}" for key, value in environment.items())],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "NEMORUN_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=240)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # ends the launcher and ranks that are still there
    assert process.returncode == 0, output
    assert "finished: SUCCEEDED" in output
    assert fired(run_dir) == {fault: 1}
    undisturbed = _train(nemo_zygote, tmp_path / "undisturbed", RECIPE)
    assert_same(undisturbed.steps, read_steps(run_dir), STEPS, output)
