"""Test the shell scripts of the pods: which node each one runs, and how it ends."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

from checkpointless.cli.commands.run import COORDINATOR
from checkpointless.launcher.coordinator.job_config import DEFAULT_PORT
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import EVENTS_FILE, EventLog
from checkpointless.observability.telemetry.scribe import scribe
from tests.unit.recipes.launch.scripts import options_of, pod_environment, run_coordinator, run_pod, script_of


def took_part(tmp_path: Path, node: int) -> None:
    (tmp_path / "run").mkdir(exist_ok=True)
    log = EventLog(tmp_path / "run" / EVENTS_FILE, node=node)
    log.emit(EventName.JOB, "begin", generation=0, nproc=32, nnodes=4)
    assert scribe.flush()


def test_a_new_pod_runs_the_node_of_its_index(tmp_path: Path, bin_dir: Path) -> None:
    for index in range(5):
        assert run_pod(tmp_path, index) == 0
        options = options_of(tmp_path / f"argv-{index}")
        assert (options.node_rank, options.nnodes, options.nproc_per_node) == (index, 4, 8)
        assert options.rdzv_endpoint == f"train-coordinator-0-0.train:{DEFAULT_PORT}"
        assert options.run_dir == tmp_path / "run"
        assert (options.script, options.script_args) == ("train.py", ["--lr", "1e-3"])


def test_the_coordinator_listens_on_its_own_address_for_the_same_job(tmp_path: Path, bin_dir: Path) -> None:
    assert run_coordinator(tmp_path) == 0
    options = options_of(tmp_path / "coordinated")
    assert options.command is COORDINATOR.act
    assert (options.nnodes, options.nproc_per_node, options.rdzv_endpoint) == (4, 8, f"10.0.0.7:{DEFAULT_PORT}")
    assert options.run_dir == tmp_path / "run"


@pytest.mark.parametrize("index", [0, 2])
def test_a_pod_that_replaces_one_comes_as_a_spare(index: int, tmp_path: Path, bin_dir: Path) -> None:
    took_part(tmp_path, 10 + index)  # this must not count as node 0, 1 or 2
    assert run_pod(tmp_path, index) == 0
    assert options_of(tmp_path / f"argv-{index}").node_rank == index
    took_part(tmp_path, index)
    for spares in ("1", "0"):
        assert run_pod(tmp_path, index, SPARES=spares) == 0
        options = options_of(tmp_path / f"argv-{index}")
        assert options.nnodes + int(spares) <= options.node_rank < options.nnodes + options.spares


def test_the_coordinators_verdict_is_the_exit_code_of_the_nodes(tmp_path: Path, bin_dir: Path) -> None:
    (tmp_path / "run").mkdir()
    verdict = tmp_path / "run" / "verdict"
    for event, said in ((None, 43), ("go", 42), ("adopt", 42)):
        more = {}
        if event is not None:
            log = tmp_path / "one.jsonl"
            log.unlink(missing_ok=True)
            EventLog(log, node=-1).emit(EventName(event), "point", generation=3)
            assert scribe.flush()
            more["FAKE_EVENT"] = log.read_text()
        assert run_coordinator(tmp_path, FAKE_COORDINATOR="1", **more) == 0
        assert int(verdict.read_text()) == said
        (tmp_path / "argv-1").unlink(missing_ok=True)
        assert run_pod(tmp_path, 1) == said  # this pod comes only now
        assert not (tmp_path / "argv-1").exists()
    verdict.unlink()
    assert run_coordinator(tmp_path, FAKE_COORDINATOR="0") == 0
    assert not verdict.exists()


def test_a_node_that_fails_waits_for_the_verdict(tmp_path: Path, bin_dir: Path) -> None:
    (tmp_path / "run").mkdir()
    words = ["bash", "-c", script_of("jobset.yaml"), "node", "train.py"]
    environment = pod_environment(tmp_path, 3, FAKE_STATUS="1")
    with subprocess.Popen(words, env=environment) as pod:
        while not (tmp_path / "argv-3").exists():
            time.sleep(0.02)
        (tmp_path / "run" / "verdict").write_text("42\n")
        assert pod.wait(60) == 42


def test_a_coordinator_that_is_killed_or_moved_says_nothing(tmp_path: Path, bin_dir: Path) -> None:
    (tmp_path / "argv-2").touch()
    assert run_coordinator(tmp_path, FAKE_COORDINATOR="killed") == 128 + signal.SIGKILL  # kubelet begins it again
    words = ["bash", "-c", script_of("jobset.yaml", "coordinator")]
    environment = pod_environment(tmp_path, 0, FAKE_COORDINATOR="deaf")
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as pod:
        assert pod.stdout is not None
        assert pod.stdout.readline() == "listening\n"
        pod.terminate()
        assert pod.wait(60) in (128 + signal.SIGKILL, 128 + signal.SIGTERM)  # the shell may see either first
    assert not (tmp_path / "stopped").exists()  # SIGTERM would have ended the job
    assert not (tmp_path / "run" / "verdict").exists()
