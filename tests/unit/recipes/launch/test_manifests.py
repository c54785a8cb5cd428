"""What recipes/launch says to JobSet, Kubeflow Trainer and shells is well formed, and all of it agrees."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubeflow_trainer_api import models

from checkpointless.cli import command_line
from checkpointless.launcher.coordinator.job_config import DEFAULT_PORT
from checkpointless.launcher.protocol.channel import MIN_TOKEN_CHARACTERS
from checkpointless.system.environment import TOKEN_ENV
from tests.ports import free_port
from tests.unit.recipes.launch.scripts import (
    LAUNCH,
    POD_FILES,
    SBATCH,
    container_of,
    env_of,
    job_of,
    loaded,
    options_of,
    run_coordinator,
    run_pod,
    run_sbatch,
    script_of,
    set_of,
    task_script,
)

KINDS = {
    "jobset.yaml": models.JobsetV1alpha2JobSet,
    "trainingruntime.yaml": models.TrainerV1alpha1ClusterTrainingRuntime,
    "trainjob.yaml": models.TrainerV1alpha1TrainJob,
}
NODE_MONITOR_GRACE_S = 50  # Kubernetes 1.32 and newer have this --node-monitor-grace-period


@pytest.mark.parametrize("name", KINDS)
def test_a_manifest_fits_its_published_model(name: str) -> None:
    said = loaded(name)
    assert said["kind"] in KINDS[name].__name__
    model = KINDS[name].from_dict(said)
    assert model is not None
    assert unknown_in(said, model.to_dict()) == []


def unknown_in(said: Any, understood: Any, where: str = "") -> list[str]:
    """Name every path in ``said`` that the model did not take over as it is."""
    if isinstance(said, dict) and isinstance(understood, dict):
        lost = [f"{where}.{key}" for key in said if key not in understood]
        return lost + [
            p for key in said if key in understood for p in unknown_in(said[key], understood[key], f"{where}.{key}")
        ]
    if isinstance(said, list) and isinstance(understood, list) and len(said) == len(understood):
        return [
            path for i, (a, b) in enumerate(zip(said, understood)) for path in unknown_in(a, b, f"{where}[{i}]")
        ]
    return [] if said == understood else [f"{where}: {said!r} became {understood!r}"]


def test_numbers_agree() -> None:
    values = {each["name"]: each.get("value") for each in container_of("jobset.yaml")["env"]}
    job = job_of("jobset.yaml")
    assert job["parallelism"] == job["completions"] == int(values["NNODES"]) + int(values["SPARES"])
    told = env_of("jobset.yaml", "coordinator")
    for key in ("NNODES", "NPROC"):
        assert told[key]["value"] == values[key]
    spec = loaded("trainjob.yaml")["spec"]
    values = {each["name"]: each["value"] for each in spec["trainer"]["env"]}
    assert spec["trainer"]["numNodes"] == int(values["NNODES"]) + int(values["SPARES"])
    assert spec["runtimeRef"]["name"] == loaded("trainingruntime.yaml")["metadata"]["name"]


def test_the_train_job_tells_the_coordinator_its_numbers() -> None:
    spec = loaded("trainjob.yaml")["spec"]
    values = {each["name"]: each["value"] for each in spec["trainer"]["env"]}
    (patch,) = spec["runtimePatches"]
    assert re.fullmatch(r"[a-z0-9.-]+/[a-z]+", patch["manager"])  # Trainer takes a path with a domain only
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    assert replicated["name"] == container["name"] == "coordinator"  # Trainer refuses variables for `node`
    told = {each["name"]: each["value"] for each in container["env"]}
    assert told == {key: values[key] for key in ("NNODES", "NPROC")}
    assert set(told) <= set(env_of("trainingruntime.yaml", "coordinator"))
    assert [each["name"] for each in set_of("trainingruntime.yaml")["replicatedJobs"]] == ["coordinator", "node"]


@pytest.mark.slow
def test_both_ways_on_kubernetes_are_the_same() -> None:
    for key in ("network", "coordinator", "successPolicy", "failurePolicy"):
        assert set_of("jobset.yaml")[key] == set_of("trainingruntime.yaml")[key]
    for key in ("successPolicy", "podFailurePolicy", "backoffLimitPerIndex", "podReplacementPolicy"):
        assert job_of("jobset.yaml")[key] == job_of("trainingruntime.yaml")[key]
    for job in ("coordinator", "node"):
        assert script_of("jobset.yaml", job) == script_of("trainingruntime.yaml", job)
        pods = [job_of(name, job)["template"]["spec"] for name in POD_FILES]
        for key in ("restartPolicy", "tolerations", "volumes", "terminationGracePeriodSeconds"):
            assert pods[0][key] == pods[1][key]
    one, other = (container_of(name, "coordinator") for name in POD_FILES)
    assert {key: one[key] for key in one if key != "env"} == {key: other[key] for key in other if key != "env"}


@pytest.mark.parametrize("job", ["node", "coordinator"])
@pytest.mark.parametrize("name", POD_FILES)
def test_a_pod_has_what_the_script_needs(name: str, job: str) -> None:
    env = env_of(name, job)
    given = {*env, "JOB_COMPLETION_INDEX"}  # Kubernetes sets that
    local = set(re.findall(r"(?:^|[ ;'])(\w+)=", script_of(name, job), re.M)) | set("@!1?")
    assert set(re.findall(r"\$\{?(\w+)", script_of(name, job))) <= given | local
    assert "secretKeyRef" in env[TOKEN_ENV]["valueFrom"]
    assert env["RUN_DIR"]["value"] == env_of(name)["RUN_DIR"]["value"]
    assert {"name": "runs", "mountPath": "/runs"} in container_of(name, job)["volumeMounts"]


@pytest.mark.parametrize("name", POD_FILES)
def test_the_coordinator_is_begun_again_in_its_place_and_the_nodes_say_how_it_ended(name: str) -> None:
    job = job_of(name, "coordinator")
    assert job["template"]["spec"]["restartPolicy"] == "OnFailure"
    assert job["podReplacementPolicy"] == "TerminatingOrFailed"
    # The first two need Never, and the last ends the Job early.
    assert not {"podFailurePolicy", "backoffLimitPerIndex", "successPolicy"} & job.keys()
    assert (job["completionMode"], job["parallelism"], job["completions"]) == ("Indexed", 1, 1)
    assert set_of(name)["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["node"]}
    assert job_of(name)["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [42, 43]
    lost, gave_up = set_of(name)["failurePolicy"]["rules"]
    assert (lost["action"], lost["onJobFailureMessagePatterns"]) == ("RestartJobSet", ["exit code 43"])
    assert (gave_up["action"], len(gave_up)) == ("FailJobSet", 2)


def test_the_coordinator_may_be_away_for_as_long_as_all_agree(tmp_path: Path, bin_dir: Path) -> None:
    assert run_pod(tmp_path, 1) == 0
    assert run_coordinator(tmp_path) == 0
    node, coordinator = options_of(tmp_path / "argv-1"), options_of(tmp_path / "coordinated")
    assert node.regroup_timeout_s == coordinator.regroup_timeout_s
    # what Kubernetes takes to give up a machine that does not answer, and a pod's start, have to fit in
    tolerated = job_of("jobset.yaml", "coordinator")["template"]["spec"]["tolerations"]
    given_up_s = max(each["tolerationSeconds"] for each in tolerated) + NODE_MONITOR_GRACE_S
    assert given_up_s + 120 < node.regroup_timeout_s


@pytest.fixture
def greeting_coordinator() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Yield a real coordinator that listens on loopback, and its port."""
    port = free_port()
    words = ["coordinator", "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    command, env = [sys.executable, "-m", "checkpointless", *words], {**os.environ, TOKEN_ENV: "t" * 32}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=env, stderr=pipe, stdout=pipe, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "coordinating 2 nodes" in line:
                break
        yield process, port
        process.kill()


@pytest.mark.slow
def test_the_probe_finds_a_coordinator_that_hangs(greeting_coordinator: tuple[subprocess.Popen[str], int]) -> None:
    process, port = greeting_coordinator
    command = container_of("jobset.yaml", "coordinator")["livenessProbe"]["exec"]["command"]
    words = [word.replace(str(DEFAULT_PORT), str(port)) for word in command]
    environment = {**os.environ, "POD_IP": "127.0.0.1"}
    greeted = (subprocess.run(words, env=environment, timeout=30).returncode == 0 for _ in range(3))
    assert any(greeted)  # it tries as often as kubelet, because this machine may be busy
    process.send_signal(signal.SIGSTOP)
    assert subprocess.run(words, env=environment, timeout=30).returncode != 0
    process.kill()
    process.wait(60)
    assert subprocess.run(words, env=environment, timeout=30, stderr=subprocess.DEVNULL).returncode != 0


@pytest.mark.slow
def test_the_token_is_in_no_command_line(tmp_path: Path, bin_dir: Path) -> None:
    run_sbatch(tmp_path)
    token = (tmp_path / "token").read_text()
    assert len(token) >= MIN_TOKEN_CHARACTERS
    for seen in (tmp_path / "srun", tmp_path / "coordinated", *tmp_path.glob("argv-*")):
        assert token not in seen.read_text()
    run_pod(tmp_path, 1)
    assert "t" * 32 not in (tmp_path / "argv-1").read_text()
    for name in POD_FILES:
        for job in ("coordinator", "node"):
            container = container_of(name, job)
            assert TOKEN_ENV not in " ".join([*container["command"], *container.get("args", [])])


def test_every_shell_script_is_clean(tmp_path: Path) -> None:
    texts = (script_of("jobset.yaml"), script_of("jobset.yaml", "coordinator"), task_script())
    scripts = [tmp_path / f"{number}.sh" for number in range(len(texts))]
    for script, text in zip(scripts, texts):
        script.write_text(f"#!/bin/bash\n{text}")
    shellcheck = Path(sys.executable).parent / "shellcheck"
    for script in (SBATCH, *scripts):
        for checker in (["bash", "-n"], [str(shellcheck)]):
            checked = subprocess.run([*checker, str(script)], capture_output=True, text=True)
            assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize(
    ("command", "needed"),
    [
        ("run", {"--nnodes", "--node-rank", "--rdzv-endpoint", "--spares", "--run-dir"}),
        ("coordinator", {"--nnodes", "--nproc-per-node", "--rdzv-endpoint", "--run-dir"}),
    ],
)
def test_every_option_is_known(command: str, needed: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line.main([command, "--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    for path in (SBATCH, *(LAUNCH / name for name in POD_FILES)):
        (call,) = re.findall(rf"checkpointless {command} ((?:.*\\\n)*.*)", path.read_text())
        used = set(re.findall(r"(?<!\S)--[a-z-]+", call))
        assert needed <= used <= known
