"""Test the batch script for Slurm: every node runs, and the job ends as its coordinator does."""

import subprocess
import time
from pathlib import Path

import pytest

from checkpointless.cli.commands.run import COORDINATOR
from tests.unit.recipes.launch import scripts
from tests.unit.recipes.launch.scripts import SBATCH, coordinated, options_of, run_sbatch, sbatch_env, task_script

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("status", [0, 1])
def test_the_script_runs_every_node_and_ends_as_the_coordinator(status: int, tmp_path: Path, bin_dir: Path) -> None:
    done = run_sbatch(tmp_path, FAKE_STATUS=str(status), FAKE_COORDINATOR=str(status))
    assert done.returncode == status, done.stderr
    (tmp_path / "argv").write_text(coordinated(tmp_path)[0])
    assert len(coordinated(tmp_path)) == 1
    coordinator = options_of(tmp_path / "argv")
    assert coordinator.command is COORDINATOR.act
    for node in range(3):
        options = options_of(tmp_path / f"argv-{node}")
        assert (options.node_rank, options.nnodes, options.spares, options.nproc_per_node) == (node, 2, 1, 8)
        assert (coordinator.nnodes, coordinator.nproc_per_node) == (options.nnodes, options.nproc_per_node)
        assert options.rdzv_endpoint == coordinator.rdzv_endpoint == f"localhost:{scripts.PORT}"
        assert options.run_dir == coordinator.run_dir == tmp_path / "runs" / f"checkpointless-{scripts.JOB}-0"
        assert options.script == "train.py"
    assert (tmp_path / "runs" / f"checkpointless-{scripts.JOB}-0" / "exit-status").read_text() == f"{status}\n"


def test_a_coordinator_that_is_killed_is_begun_again_at_the_same_place(tmp_path: Path, bin_dir: Path) -> None:
    done = run_sbatch(tmp_path, FAKE_COORDINATOR="killed killed 0", FAKE_COORDINATORS="3")
    assert done.returncode == 0, done.stderr
    assert (len(coordinated(tmp_path)), len(set(coordinated(tmp_path)))) == (3, 1)


def test_the_end_of_the_time_limit_ends_the_job_by_the_coordinator(tmp_path: Path, bin_dir: Path) -> None:
    assert "#SBATCH --signal=B:TERM@120" in SBATCH.read_text()
    # Agents that had ended well would say that the job has, if the script misses them before the coordinator.
    more = {"FAKE_COORDINATOR": "deaf", "FAKE_STATUS": "1", "FAKE_LONGER": "30"}
    environment = sbatch_env(tmp_path, **more)
    with subprocess.Popen(["bash", str(SBATCH)], env=environment, cwd=tmp_path) as job:
        while not (tmp_path / "argv-0").exists():
            time.sleep(0.05)
        job.terminate()
        assert job.wait(60) == 1
    assert (tmp_path / "stopped").exists()
    assert len(coordinated(tmp_path)) == 1


@pytest.mark.parametrize(
    ("moves", "restarts", "asked"),
    [(False, "0", "scontrol requeue {}"), (False, "3", "scancel {}"), (True, "0", "")],
)
def test_a_node_whose_job_has_lost_its_batch_host_has_it_started_again(
    moves: bool, restarts: str, asked: str, tmp_path: Path, bin_dir: Path
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "alive").write_text("17\n")
    job = {"NPROC": "8", "NNODES": "2", "SPARES": "1", "RDZV_ENDPOINT": "node-a:30111", "RUN_DIR": str(run_dir)}
    of_node = {"SLURM_NODEID": "1", "SLURM_RESTART_COUNT": restarts, "BATCH_LOST": "2", "FAKE_STATUS": "1"}
    environment = sbatch_env(tmp_path, **job, **of_node)
    with subprocess.Popen(["bash", "-c", task_script(), "node", "train.py"], env=environment) as task:
        if moves:
            time.sleep(1)
            (run_dir / "alive").write_text("18\n")
        assert task.wait(30) == 1
    said = (tmp_path / "asked").read_text().strip() if (tmp_path / "asked").exists() else ""
    assert said == asked.format(scripts.JOB)


def test_the_batch_script_refuses_what_cannot_work(tmp_path: Path, bin_dir: Path) -> None:
    for more, what in (
        ({"FAKE_ADDRESS": "127.0.1.1"}, "set RDZV_HOST"),
        ({"SPARES": "3"}, "leave none that trains"),
    ):
        refused = run_sbatch(tmp_path, **more)
        assert refused.returncode == 2
        assert what in refused.stderr
    assert not (tmp_path / "srun").exists()
