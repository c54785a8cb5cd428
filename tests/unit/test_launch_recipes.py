"""What recipes/launch says to Slurm, JobSet and Kubeflow Trainer: it is well formed, and its shell scripts work."""

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml
from kubeflow_trainer_api import models

from checkpointless import cli
from checkpointless.agent.handshake import MIN_TOKEN_CHARACTERS, TOKEN_ENV
from checkpointless.agent.launch import DEFAULT_PORT
from checkpointless.telemetry.events import EVENTS_FILE, EventLog

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "recipes" / "launch"
SBATCH = LAUNCH / "slurm.sbatch"
KINDS = {
    "jobset.yaml": models.JobsetV1alpha2JobSet,
    "trainingruntime.yaml": models.TrainerV1alpha1ClusterTrainingRuntime,
    "trainjob.yaml": models.TrainerV1alpha1TrainJob,
}
POD_FILES = ("jobset.yaml", "trainingruntime.yaml")
FAKE_AGENT = """\
#!/bin/bash
echo "$@" > "$FAKE_DIR/argv-${SLURM_NODEID:-$JOB_COMPLETION_INDEX}"
trap 'exit 1' TERM
if [ -n "$FAKE_WAIT" ]; then echo waiting; for _ in {1..200}; do sleep 0.05; done; fi
exit "${FAKE_STATUS:-0}"
"""


def loaded(name: str) -> Any:
    return yaml.safe_load((LAUNCH / name).read_text())


def job_of(name: str) -> dict[str, Any]:
    """The Job that the file has JobSet make."""
    spec = loaded(name)["spec"]
    (replicated,) = (spec if "replicatedJobs" in spec else spec["template"]["spec"])["replicatedJobs"]
    return replicated["template"]["spec"]  # type: ignore[no-any-return]


def container_of(name: str) -> dict[str, Any]:
    (container,) = job_of(name)["template"]["spec"]["containers"]
    return container  # type: ignore[no-any-return]


def script_of(name: str) -> str:
    """The shell script of a pod."""
    container = container_of(name)
    words = [*container["command"], *container.get("args", [])]
    assert words[:2] == ["bash", "-c"]
    return str(words[2])


def env_of(name: str) -> dict[str, Any]:
    return {each["name"]: each for each in container_of(name)["env"]}


@pytest.fixture
def bin_dir(tmp_path: Path) -> Path:
    """A folder for commands of our own, with a `checkpointless` that writes down its arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    put(folder, "checkpointless", FAKE_AGENT)
    return folder


def put(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def options_of(argv: Path) -> argparse.Namespace:
    """What the command line makes of the words that the fake agent got."""
    options, extra = cli._parser().parse_known_args(shlex.split(argv.read_text()))
    assert not extra
    return options


def pod_environment(tmp_path: Path, index: int, **more: str) -> dict[str, str]:
    return {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "FAKE_DIR": str(tmp_path),
        "JOB_COMPLETION_INDEX": str(index),
        "NNODES": "4",
        "SPARES": "1",
        "NPROC": "8",
        "COORDINATOR": "train-node-0-0.train",
        "POD_IP": "10.0.0.7",
        "RUN_DIR": str(tmp_path / "run"),
        TOKEN_ENV: "t" * 32,
        **more,
    }


def run_pod(tmp_path: Path, index: int, **more: str) -> int:
    """The exit status of a pod's script."""
    words = ["bash", "-c", script_of("jobset.yaml"), "node", "train.py", "--lr", "1e-3"]
    return subprocess.run(words, env=pod_environment(tmp_path, index, **more), timeout=30).returncode


def took_part(tmp_path: Path, node: int) -> None:
    """Have the run directory say that the agent of ``node`` was let in."""
    (tmp_path / "run").mkdir(exist_ok=True)
    EventLog(tmp_path / "run" / EVENTS_FILE, node=node).emit("job", "begin", generation=0, nproc=32, nnodes=4)


# ---- the manifests


@pytest.mark.parametrize("name", KINDS)
def test_a_manifest_fits_its_published_model(name: str) -> None:
    said = loaded(name)
    assert said["kind"] in KINDS[name].__name__
    model = KINDS[name].from_dict(said)
    assert model is not None
    assert unknown_in(said, model.to_dict()) == []


def unknown_in(said: Any, understood: Any, where: str = "") -> list[str]:
    """Paths in ``said`` that the model did not take over: fields that it does not know."""
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


def test_an_unknown_field_is_noticed() -> None:
    said = loaded("jobset.yaml")
    said["spec"]["network"]["enableDnsHostnames"] = True
    said["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["prots"] = []
    model = models.JobsetV1alpha2JobSet.from_dict(said)
    assert model is not None
    assert len(unknown_in(said, model.to_dict())) == 2


def test_numbers_agree() -> None:
    values = {each["name"]: each.get("value") for each in container_of("jobset.yaml")["env"]}
    job = job_of("jobset.yaml")
    assert job["parallelism"] == job["completions"] == int(values["NNODES"]) + int(values["SPARES"])
    trainer = loaded("trainjob.yaml")["spec"]["trainer"]
    values = {each["name"]: each["value"] for each in trainer["env"]}
    assert trainer["numNodes"] == int(values["NNODES"]) + int(values["SPARES"])
    assert (
        loaded("trainjob.yaml")["spec"]["runtimeRef"]["name"] == loaded("trainingruntime.yaml")["metadata"]["name"]
    )


def test_both_ways_on_kubernetes_are_the_same() -> None:
    assert script_of("jobset.yaml") == script_of("trainingruntime.yaml")
    jobset, runtime = loaded("jobset.yaml")["spec"], loaded("trainingruntime.yaml")["spec"]["template"]["spec"]
    for key in ("network", "coordinator", "failurePolicy"):
        assert jobset[key] == runtime[key]
    for key in ("successPolicy", "podFailurePolicy", "backoffLimitPerIndex", "podReplacementPolicy"):
        assert job_of("jobset.yaml")[key] == job_of("trainingruntime.yaml")[key]
    pods = [job_of(name)["template"]["spec"] for name in POD_FILES]
    for key in ("restartPolicy", "tolerations", "volumes"):
        assert pods[0][key] == pods[1][key]


@pytest.mark.parametrize("name", POD_FILES)
def test_a_pod_has_what_the_script_needs(name: str) -> None:
    env = env_of(name)
    given = {*env, "JOB_COMPLETION_INDEX"}  # Kubernetes sets that
    local = set(re.findall(r"(?:^|[ ;'])(\w+)=", script_of(name), re.M)) | set("@!1?")
    assert set(re.findall(r"\$\{?(\w+)", script_of(name))) <= given | local
    assert "secretKeyRef" in env[TOKEN_ENV]["valueFrom"]
    shm = next(each for each in job_of(name)["template"]["spec"]["volumes"] if each["name"] == "shm")
    assert shm["emptyDir"]["medium"] == "Memory"
    assert {"name": "shm", "mountPath": "/dev/shm"} in container_of(name)["volumeMounts"]
    ports = {each["name"]: each["containerPort"] for each in container_of(name)["ports"]}
    assert ports["coordinator"] == DEFAULT_PORT
    assert f"--http-port {ports['http']}" in script_of(name)
    for probe in ("startupProbe", "livenessProbe"):
        assert container_of(name)[probe]["httpGet"] == {"path": "/healthz", "port": "http"}


# ---- the script of a pod


def test_a_new_pod_runs_the_node_of_its_index(tmp_path: Path, bin_dir: Path) -> None:
    for index, endpoint in enumerate(["10.0.0.7:29400", *["train-node-0-0.train:29400"] * 4]):
        assert run_pod(tmp_path, index) == 0
        options = options_of(tmp_path / f"argv-{index}")
        assert (options.node_rank, options.nnodes, options.nproc_per_node) == (index, 4, 8)
        assert options.rdzv_endpoint == endpoint
        assert options.run_dir == tmp_path / "run"
        assert (options.script, options.script_args) == ("train.py", ["--lr", "1e-3"])


def test_a_pod_that_replaces_one_comes_as_a_spare(tmp_path: Path, bin_dir: Path) -> None:
    took_part(tmp_path, 12)  # and not 1 or 2
    assert run_pod(tmp_path, 2) == 0
    assert options_of(tmp_path / "argv-2").node_rank == 2
    took_part(tmp_path, 2)
    for spares in ("1", "0"):
        assert run_pod(tmp_path, 2, SPARES=spares) == 0
        options = options_of(tmp_path / "argv-2")
        assert options.nnodes + int(spares) <= options.node_rank < options.nnodes + options.spares


def test_node_0_is_not_replaced(tmp_path: Path, bin_dir: Path) -> None:
    took_part(tmp_path, 0)
    assert run_pod(tmp_path, 0) == 43
    assert not (tmp_path / "argv-0").exists()


def test_the_end_of_node_0_is_told_from_that_of_others(tmp_path: Path, bin_dir: Path) -> None:
    assert run_pod(tmp_path, 0, FAKE_STATUS="1") == 42
    assert run_pod(tmp_path, 3, FAKE_STATUS="1") == 1
    rules = job_of("jobset.yaml")["podFailurePolicy"]["rules"]
    assert rules[0]["action"] == "FailJob"
    assert rules[0]["onExitCodes"]["values"] == [42, 43]


def test_a_node_0_that_is_stopped_was_lost(tmp_path: Path, bin_dir: Path) -> None:
    words = ["bash", "-c", script_of("jobset.yaml"), "node", "train.py"]
    environment = pod_environment(tmp_path, 0, FAKE_WAIT="1")
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as pod:
        assert pod.stdout is not None
        assert pod.stdout.readline() == "waiting\n"
        pod.terminate()
        assert pod.wait(20) == 43


# ---- Slurm


def run_sbatch(tmp_path: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the batch script with stand-ins for what Slurm brings; its step has 3 nodes on this machine."""
    put(tmp_path / "bin", "scontrol", "#!/bin/bash\necho node-a; echo node-b; echo node-c\n")
    put(tmp_path / "bin", "getent", '#!/bin/bash\necho "${FAKE_ADDRESS:-10.0.0.1} STREAM $2"\n')
    put(
        tmp_path / "bin",
        "srun",
        '#!/bin/bash\necho "$@" > "$FAKE_DIR/srun"; echo -n "$CHECKPOINTLESS_TOKEN" > "$FAKE_DIR/token"\n'
        "while [[ $1 == --* ]]; do shift; done\n"
        'for node in 2 1 0; do SLURM_NODEID=$node "$@"; done\nexit 1\n',
    )
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "FAKE_DIR": str(tmp_path),
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_JOB_NODELIST": "node-[a-c]",
        "SLURM_JOB_NAME": "checkpointless",
        "SLURM_JOB_ID": "4711",
        **more,
    }
    words = ["bash", str(SBATCH)]
    return subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("status", [0, 1])
def test_the_batch_script_runs_every_node_and_ends_as_node_0(status: int, tmp_path: Path, bin_dir: Path) -> None:
    assert run_sbatch(tmp_path, FAKE_STATUS=str(status)).returncode == status
    for node in range(3):
        options = options_of(tmp_path / f"argv-{node}")
        assert (options.node_rank, options.nnodes, options.spares, options.nproc_per_node) == (node, 2, 1, 8)
        assert options.rdzv_endpoint == f"node-a:{DEFAULT_PORT + 711}"
        assert options.run_dir == tmp_path / "runs" / "checkpointless-4711-0"
        assert options.script == "train.py"


def test_the_batch_script_refuses_what_cannot_work(tmp_path: Path, bin_dir: Path) -> None:
    for more, what in (
        ({"FAKE_ADDRESS": "127.0.1.1"}, "set RDZV_HOST"),
        ({"SPARES": "3"}, "leave none that trains"),
    ):
        refused = run_sbatch(tmp_path, **more)
        assert refused.returncode == 2
        assert what in refused.stderr
    assert not (tmp_path / "srun").exists()


def test_the_token_is_in_no_command_line(tmp_path: Path, bin_dir: Path) -> None:
    run_sbatch(tmp_path)
    token = (tmp_path / "token").read_text()
    assert len(token) >= MIN_TOKEN_CHARACTERS
    for seen in (tmp_path / "srun", *tmp_path.glob("argv-*")):
        assert token not in seen.read_text()
    run_pod(tmp_path, 1)
    assert "t" * 32 not in (tmp_path / "argv-1").read_text()
    for name in POD_FILES:
        container = container_of(name)
        assert TOKEN_ENV not in " ".join([*container["command"], *container.get("args", [])])


# ---- all


def test_every_shell_script_is_clean(tmp_path: Path) -> None:
    pod = tmp_path / "pod.sh"
    pod.write_text("#!/bin/bash\n" + script_of("jobset.yaml"))
    (node,) = re.findall(r"^node='\n(.*?)^'$", SBATCH.read_text(), re.M | re.S)
    task = tmp_path / "task.sh"
    task.write_text("#!/bin/bash\n" + node)
    shellcheck = Path(sys.executable).parent / "shellcheck"
    for script in (SBATCH, pod, task):
        for checker in (["bash", "-n"], [str(shellcheck)]):
            checked = subprocess.run([*checker, str(script)], capture_output=True, text=True)
            assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_option_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["run", "--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    used: set[str] = set()
    for path in LAUNCH.iterdir():
        for call in re.findall(r"checkpointless run ((?:.*\\\n)*.*)", path.read_text()):
            used |= set(re.findall(r"(?<!\S)--[a-z-]+", call))
    assert {"--nnodes", "--node-rank", "--rdzv-endpoint", "--spares", "--run-dir"} <= used
    assert used <= known


def test_the_launch_recipes_are_packaged() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    packaged = {path for pattern in data["checkpointless.recipes"] for path in (ROOT / "recipes").glob(pattern)}
    assert set(LAUNCH.iterdir()) <= packaged
