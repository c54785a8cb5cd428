"""What recipes/launch says to Slurm, JobSet and Kubeflow Trainer: it is well formed, and its shell scripts work."""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml
from kubeflow_trainer_api import models

from checkpointless.agent.launch_config import DEFAULT_PORT
from checkpointless.cli import command_line
from checkpointless.cli.commands import coordinator as coordinator_command
from checkpointless.environment import TOKEN_ENV
from checkpointless.telemetry.event_names import EventName
from checkpointless.telemetry.events import EVENTS_FILE, EventLog
from checkpointless.telemetry.scribe import scribe
from checkpointless.wire.handshake import MIN_TOKEN_CHARACTERS
from tests.ports import free_port

ROOT = Path(__file__).parents[3]
LAUNCH = ROOT / "recipes" / "launch"
SBATCH = LAUNCH / "slurm.sbatch"
KINDS = {
    "jobset.yaml": models.JobsetV1alpha2JobSet,
    "trainingruntime.yaml": models.TrainerV1alpha1ClusterTrainingRuntime,
    "trainjob.yaml": models.TrainerV1alpha1TrainJob,
}
POD_FILES = ("jobset.yaml", "trainingruntime.yaml")
NODE_MONITOR_GRACE_S = 50  # --node-monitor-grace-period of Kubernetes 1.32 and newer
FAKE_AGENT = """\
#!/bin/bash
if [ "$1" = coordinator ]; then
    echo "$@" >> "$FAKE_DIR/coordinated"
    exec "$PYTHON" "$FAKE_DIR/coordinator.py" "$@"
fi
echo "$@" > "$FAKE_DIR/argv-${SLURM_NODEID:-$JOB_COMPLETION_INDEX}"
trap 'exit 1' TERM
if [ -n "$FAKE_WAIT" ]; then echo waiting; for _ in {1..200}; do sleep 0.05; done; fi
exit "${FAKE_STATUS:-0}"
"""
# Listens, and does what FAKE_COORDINATOR says: a word for each start, the last for all further ones. `killed`: dies
# of SIGKILL, once a node has run; `deaf`: stays, whatever happens; a number: ends with it, once all nodes have run.
FAKE_COORDINATOR = """\
import os, pathlib, signal, socket, sys, time
here = pathlib.Path(os.environ["FAKE_DIR"])
host, _, port = sys.argv[sys.argv.index("--rdzv-endpoint") + 1].rpartition(":")
listener = socket.create_server(("127.0.0.1", int(port) if host == "localhost" else 0))
acts = os.environ["FAKE_COORDINATOR"].split()
starts = len((here / "coordinated").read_text().splitlines())
act = acts[min(starts, len(acts)) - 1]
def stopped(*_):
    (here / "stopped").touch()
    sys.exit(1)
signal.signal(signal.SIGTERM, stopped)
if "FAKE_EVENT" in os.environ:
    (here / "run").mkdir(exist_ok=True)
    with (here / "run" / "events.jsonl").open("a") as events:
        events.write(os.environ["FAKE_EVENT"])
print("listening", flush=True)
while act == "deaf" or not (here / ("argv-2" if act == "killed" else "argv-0")).exists():
    time.sleep(0.02)
if act == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(act))
"""


def loaded(name: str) -> Any:
    return yaml.safe_load((LAUNCH / name).read_text())


def set_of(name: str) -> dict[str, Any]:
    """What the file says of the JobSet."""
    spec = loaded(name)["spec"]
    return spec if "replicatedJobs" in spec else spec["template"]["spec"]  # type: ignore[no-any-return]


def job_of(name: str, job: str = "node") -> dict[str, Any]:
    """One of the two Jobs that the file has JobSet make."""
    (replicated,) = (each for each in set_of(name)["replicatedJobs"] if each["name"] == job)
    assert replicated["replicas"] == 1
    return replicated["template"]["spec"]  # type: ignore[no-any-return]


def container_of(name: str, job: str = "node") -> dict[str, Any]:
    (container,) = job_of(name, job)["template"]["spec"]["containers"]
    assert container["name"] == job
    return container  # type: ignore[no-any-return]


def script_of(name: str, job: str = "node") -> str:
    """The shell script of a pod."""
    container = container_of(name, job)
    words = [*container["command"], *container.get("args", [])]
    assert words[:2] == ["bash", "-c"]
    return str(words[2])


def env_of(name: str, job: str = "node") -> dict[str, Any]:
    return {each["name"]: each for each in container_of(name, job)["env"]}


@pytest.fixture
def bin_dir(tmp_path: Path) -> Path:
    """A folder for commands of our own, with a `checkpointless` that writes down its arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    put(folder, "checkpointless", FAKE_AGENT)
    put(tmp_path, "coordinator.py", FAKE_COORDINATOR)
    return folder


def put(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def options_of(argv: Path) -> argparse.Namespace:
    """What the command line makes of the words that the fake agent got."""
    options, extra = command_line._parser().parse_known_args(shlex.split(argv.read_text()))
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
        "COORDINATOR": "train-coordinator-0-0.train",
        "PYTHON": sys.executable,
        "FAKE_COORDINATOR": "0",
        "POD_IP": "10.0.0.7",
        "RUN_DIR": str(tmp_path / "run"),
        TOKEN_ENV: "t" * 32,
        **more,
    }


def run_pod(tmp_path: Path, index: int, **more: str) -> int:
    """The exit status of a pod's script."""
    words = ["bash", "-c", script_of("jobset.yaml"), "node", "train.py", "--lr", "1e-3"]
    return subprocess.run(words, env=pod_environment(tmp_path, index, **more), timeout=30).returncode


def run_coordinator(tmp_path: Path, **more: str) -> int:
    """The exit status of the script of the coordinator's pod."""
    words = ["bash", "-c", script_of("jobset.yaml", "coordinator")]
    environment = pod_environment(tmp_path, 0, **more)
    (tmp_path / "argv-0").touch()  # as if all nodes had run
    return subprocess.run(words, env=environment, timeout=30, stdout=subprocess.DEVNULL).returncode


def took_part(tmp_path: Path, node: int) -> None:
    """Have the run directory say that the agent of ``node`` was let in."""
    (tmp_path / "run").mkdir(exist_ok=True)
    EventLog(tmp_path / "run" / EVENTS_FILE, node=node).emit(
        EventName.JOB, "begin", generation=0, nproc=32, nnodes=4
    )
    assert scribe.flush()


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
    for replicated in said["spec"]["replicatedJobs"]:
        replicated["template"]["spec"]["template"]["spec"]["containers"][0]["prots"] = []
    model = models.JobsetV1alpha2JobSet.from_dict(said)
    assert model is not None
    assert len(unknown_in(said, model.to_dict())) == 3


def test_numbers_agree() -> None:
    values = {each["name"]: each.get("value") for each in container_of("jobset.yaml")["env"]}
    job = job_of("jobset.yaml")
    assert job["parallelism"] == job["completions"] == int(values["NNODES"]) + int(values["SPARES"])
    told = env_of("jobset.yaml", "coordinator")
    assert {key: told[key]["value"] for key in ("NNODES", "NPROC")} == {
        key: values[key] for key in ("NNODES", "NPROC")
    }
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
def test_a_node_has_memory_to_share_and_says_how_it_is(name: str) -> None:
    shm = next(each for each in job_of(name)["template"]["spec"]["volumes"] if each["name"] == "shm")
    assert shm["emptyDir"]["medium"] == "Memory"
    assert {"name": "shm", "mountPath": "/dev/shm"} in container_of(name)["volumeMounts"]
    ports = {each["name"]: each["containerPort"] for each in container_of(name)["ports"]}
    assert f"--http-port {ports['http']}" in script_of(name)
    for probe in ("startupProbe", "livenessProbe"):
        assert container_of(name)[probe]["httpGet"] == {"path": "/healthz", "port": "http"}


@pytest.mark.parametrize("name", POD_FILES)
def test_the_coordinator_has_a_name_a_port_and_probes(name: str) -> None:
    assert set_of(name)["network"]["enableDNSHostnames"] is True
    assert set_of(name)["network"]["publishNotReadyAddresses"] is True
    assert set_of(name)["coordinator"] == {"replicatedJob": "coordinator", "jobIndex": 0, "podIndex": 0}
    annotation = "metadata.annotations['jobset.sigs.k8s.io/coordinator']"
    assert env_of(name)["COORDINATOR"]["valueFrom"]["fieldRef"]["fieldPath"] == annotation
    container = container_of(name, "coordinator")
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert (set(ports), ports["coordinator"]) == ({"coordinator", "http"}, DEFAULT_PORT)
    assert f"--http-port {ports['http']}" in script_of(name, "coordinator")
    for probe in ("readinessProbe", "startupProbe"):
        assert container[probe]["tcpSocket"] == {"port": "coordinator"}
    assert f"/dev/tcp/$POD_IP/{DEFAULT_PORT}" in container["livenessProbe"]["exec"]["command"][-1]
    assert "nvidia.com/gpu" not in str(container["resources"])


@pytest.mark.parametrize("name", POD_FILES)
def test_the_coordinator_is_begun_again_in_its_place_and_the_nodes_say_how_it_ended(name: str) -> None:
    job = job_of(name, "coordinator")
    assert job["template"]["spec"]["restartPolicy"] == "OnFailure"
    assert job["podReplacementPolicy"] == "TerminatingOrFailed"
    assert (
        not {"podFailurePolicy", "backoffLimitPerIndex", "successPolicy"} & job.keys()
    )  # go with Never, or ends early
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
    assert node.regroup_timeout == coordinator.regroup_timeout
    # what Kubernetes takes to give up a machine that does not answer, and a pod's start, have to fit in
    tolerated = job_of("jobset.yaml", "coordinator")["template"]["spec"]["tolerations"]
    assert max(each["tolerationSeconds"] for each in tolerated) + NODE_MONITOR_GRACE_S + 120 < node.regroup_timeout


@pytest.fixture
def greeting_coordinator() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A real coordinator that listens on loopback, and its port."""
    port = free_port()
    words = ["coordinator", "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    with subprocess.Popen(
        [sys.executable, "-m", "checkpointless", *words],
        env={**os.environ, TOKEN_ENV: "t" * 32},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "coordinating 2 nodes" in line:
                break
        yield process, port
        process.kill()


def test_the_liveness_probe_finds_a_coordinator_that_hangs(
    greeting_coordinator: tuple[subprocess.Popen[str], int],
) -> None:
    process, port = greeting_coordinator
    command = container_of("jobset.yaml", "coordinator")["livenessProbe"]["exec"]["command"]
    words = [word.replace(str(DEFAULT_PORT), str(port)) for word in command]
    environment = {**os.environ, "POD_IP": "127.0.0.1"}
    greeted = (subprocess.run(words, env=environment, timeout=30).returncode == 0 for _ in range(3))
    assert any(greeted)  # as often as kubelet tries: this machine may be busy
    process.send_signal(signal.SIGSTOP)
    assert subprocess.run(words, env=environment, timeout=30).returncode != 0
    process.kill()
    process.wait(20)
    assert subprocess.run(words, env=environment, timeout=30, stderr=subprocess.DEVNULL).returncode != 0


# ---- the script of a pod


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
    assert options.command is coordinator_command.COMMAND.act
    assert (options.nnodes, options.nproc_per_node) == (4, 8)
    assert options.rdzv_endpoint == f"10.0.0.7:{DEFAULT_PORT}"
    assert options.run_dir == tmp_path / "run"


@pytest.mark.parametrize("index", [0, 2])
def test_a_pod_that_replaces_one_comes_as_a_spare(index: int, tmp_path: Path, bin_dir: Path) -> None:
    took_part(tmp_path, 10 + index)  # and not 0, 1 or 2
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
        assert run_pod(tmp_path, 1) == said  # a pod that comes only now
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
        assert pod.wait(20) == 42


def test_a_node_that_fails_alone_is_replaced(tmp_path: Path, bin_dir: Path) -> None:
    script = script_of("jobset.yaml")
    assert "sleep 1;" in script
    words = ["bash", "-c", script.replace("sleep 1;", ":;"), "node", "train.py"]
    environment = pod_environment(tmp_path, 3, FAKE_STATUS="1")
    assert subprocess.run(words, env=environment, timeout=30).returncode == 1
    assert 1 not in job_of("jobset.yaml")["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"]


def test_a_node_that_is_stopped_ends_its_agent_and_asks_nobody(tmp_path: Path, bin_dir: Path) -> None:
    words = ["bash", "-c", script_of("jobset.yaml"), "node", "train.py"]
    environment = pod_environment(tmp_path, 0, FAKE_WAIT="1")
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as pod:
        assert pod.stdout is not None
        assert pod.stdout.readline() == "waiting\n"
        pod.terminate()
        assert pod.wait(10) == 1


def test_a_coordinator_that_is_killed_or_moved_says_nothing(tmp_path: Path, bin_dir: Path) -> None:
    (tmp_path / "argv-2").touch()
    assert (
        run_coordinator(tmp_path, FAKE_COORDINATOR="killed") == 128 + signal.SIGKILL
    )  # and kubelet begins it again
    words = ["bash", "-c", script_of("jobset.yaml", "coordinator")]
    environment = pod_environment(tmp_path, 0, FAKE_COORDINATOR="deaf")
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as pod:
        assert pod.stdout is not None
        assert pod.stdout.readline() == "listening\n"
        pod.terminate()
        assert pod.wait(10) in (128 + signal.SIGKILL, 128 + signal.SIGTERM)  # whichever the shell saw first
    assert not (tmp_path / "stopped").exists()  # SIGTERM would have ended the job
    assert not (tmp_path / "run" / "verdict").exists()


# ---- Slurm


def sbatch_environment(tmp_path: Path, **more: str) -> dict[str, str]:
    """Stand-ins for what Slurm brings; the step has 3 nodes on this machine, of which the first runs last."""
    put(
        tmp_path / "bin",
        "scontrol",
        '#!/bin/bash\nif [ "$1" = show ]; then echo localhost; echo node-b; echo node-c; exit; fi\n'
        'echo "scontrol $*" >> "$FAKE_DIR/asked"\n',
    )
    put(tmp_path / "bin", "scancel", '#!/bin/bash\necho "scancel $*" >> "$FAKE_DIR/asked"\n')
    put(tmp_path / "bin", "getent", '#!/bin/bash\necho "${FAKE_ADDRESS:-10.0.0.1} STREAM $2"\n')
    put(
        tmp_path / "bin",
        "srun",
        '#!/bin/bash\necho "$@" > "$FAKE_DIR/srun"; echo -n "$CHECKPOINTLESS_TOKEN" > "$FAKE_DIR/token"\n'
        "while [[ $1 == --* ]]; do shift; done\n"
        'for node in 2 1 0; do SLURM_NODEID=$node "$@"; done\n'
        'sleep "${FAKE_LONGER:-0}"\nexit 1\n',
    )
    return {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "FAKE_DIR": str(tmp_path),
        "FAKE_COORDINATOR": "0",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_JOB_NODELIST": "node-[a-c]",
        "SLURM_JOB_NAME": "checkpointless",
        "SLURM_JOB_ID": "4711",
        "BATCH_LOST": "1",
        **more,
    }


def run_sbatch(tmp_path: Path, **more: str) -> subprocess.CompletedProcess[str]:
    words = ["bash", str(SBATCH)]
    environment = sbatch_environment(tmp_path, **more)
    return subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)


def coordinated(tmp_path: Path) -> list[str]:
    """The command lines of every coordinator that was begun."""
    return (tmp_path / "coordinated").read_text().splitlines()


@pytest.mark.parametrize("status", [0, 1])
def test_the_batch_script_runs_every_node_and_ends_as_the_coordinator(
    status: int, tmp_path: Path, bin_dir: Path
) -> None:
    done = run_sbatch(tmp_path, FAKE_STATUS=str(status), FAKE_COORDINATOR=str(status))
    assert done.returncode == status, done.stderr
    (tmp_path / "argv").write_text(coordinated(tmp_path)[0])
    assert len(coordinated(tmp_path)) == 1
    coordinator = options_of(tmp_path / "argv")
    assert coordinator.command is coordinator_command.COMMAND.act
    for node in range(3):
        options = options_of(tmp_path / f"argv-{node}")
        assert (options.node_rank, options.nnodes, options.spares, options.nproc_per_node) == (node, 2, 1, 8)
        assert (coordinator.nnodes, coordinator.nproc_per_node) == (options.nnodes, options.nproc_per_node)
        assert options.rdzv_endpoint == coordinator.rdzv_endpoint == f"localhost:{DEFAULT_PORT + 711}"
        assert options.run_dir == coordinator.run_dir == tmp_path / "runs" / "checkpointless-4711-0"
        assert options.script == "train.py"
    assert (tmp_path / "runs" / "checkpointless-4711-0" / "exit-status").read_text() == f"{status}\n"


def test_a_coordinator_that_is_killed_is_begun_again_at_the_same_place(tmp_path: Path, bin_dir: Path) -> None:
    done = run_sbatch(tmp_path, FAKE_COORDINATOR="killed killed 0", FAKE_LONGER="4")
    assert done.returncode == 0, done.stderr
    assert len(coordinated(tmp_path)) == 3
    assert len(set(coordinated(tmp_path))) == 1


def run_changed_sbatch(tmp_path: Path, old: str, new: str, **more: str) -> int:
    """The exit status of a batch script in which a number is smaller."""
    script = SBATCH.read_text()
    assert script.count(old) == 1
    changed = tmp_path / "changed.sbatch"
    changed.write_text(script.replace(old, new))
    environment = sbatch_environment(tmp_path, **more)
    return subprocess.run(["bash", str(changed)], env=environment, cwd=tmp_path, timeout=60).returncode


def test_a_coordinator_is_not_begun_again_for_ever(tmp_path: Path, bin_dir: Path) -> None:
    more = {"FAKE_COORDINATOR": "killed", "FAKE_LONGER": "5", "FAKE_STATUS": "1"}
    assert run_changed_sbatch(tmp_path, "starts == 10", "starts == 3", **more) == 1
    assert len(coordinated(tmp_path)) == 3


@pytest.mark.parametrize("status", [0, 1])
def test_a_coordinator_begun_again_when_all_was_over_does_not_spoil_it(
    status: int, tmp_path: Path, bin_dir: Path
) -> None:
    more = {"FAKE_COORDINATOR": "killed deaf", "FAKE_LONGER": "2", "FAKE_STATUS": str(status)}
    assert run_changed_sbatch(tmp_path, '"$coordinator" 15', '"$coordinator" 1', **more) == status
    assert len(coordinated(tmp_path)) == 2


def test_the_end_of_the_time_limit_ends_the_job_by_the_coordinator(tmp_path: Path, bin_dir: Path) -> None:
    assert "#SBATCH --signal=B:TERM@120" in SBATCH.read_text()
    environment = sbatch_environment(tmp_path, FAKE_COORDINATOR="deaf", FAKE_LONGER="30")
    with subprocess.Popen(["bash", str(SBATCH)], env=environment, cwd=tmp_path) as job:
        while not (tmp_path / "argv-0").exists():
            time.sleep(0.05)
        job.terminate()
        assert job.wait(60) == 1
    assert (tmp_path / "stopped").exists()
    assert len(coordinated(tmp_path)) == 1


@pytest.mark.parametrize(
    ("moves", "restarts", "asked"),
    [(False, "0", "scontrol requeue 4711"), (False, "3", "scancel 4711"), (True, "0", "")],
)
def test_a_node_whose_job_has_lost_its_batch_host_has_it_started_again(
    moves: bool, restarts: str, asked: str, tmp_path: Path, bin_dir: Path
) -> None:
    (node,) = re.findall(r"^node='\n(.*?)^'$", SBATCH.read_text(), re.M | re.S)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "alive").write_text("17\n")
    environment = sbatch_environment(
        tmp_path,
        FAKE_STATUS="1",
        SLURM_NODEID="1",
        SLURM_RESTART_COUNT=restarts,
        BATCH_LOST="2",
        RUN_DIR=str(run_dir),
        **{"NPROC": "8", "NNODES": "2", "SPARES": "1", "RDZV_ENDPOINT": "node-a:30111"},
    )
    with subprocess.Popen(["bash", "-c", node, "node", "train.py"], env=environment) as task:
        if moves:
            time.sleep(1)
            (run_dir / "alive").write_text("18\n")
        assert task.wait(30) == 1
    said = (tmp_path / "asked").read_text().strip() if (tmp_path / "asked").exists() else ""
    assert said == asked


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
    for seen in (tmp_path / "srun", tmp_path / "coordinated", *tmp_path.glob("argv-*")):
        assert token not in seen.read_text()
    run_pod(tmp_path, 1)
    assert "t" * 32 not in (tmp_path / "argv-1").read_text()
    for name in POD_FILES:
        for job in ("coordinator", "node"):
            container = container_of(name, job)
            assert TOKEN_ENV not in " ".join([*container["command"], *container.get("args", [])])


# ---- all


def test_every_shell_script_is_clean(tmp_path: Path) -> None:
    pod, coordinator = tmp_path / "pod.sh", tmp_path / "coordinator.sh"
    pod.write_text("#!/bin/bash\n" + script_of("jobset.yaml"))
    coordinator.write_text("#!/bin/bash\n" + script_of("jobset.yaml", "coordinator"))
    (node,) = re.findall(r"^node='\n(.*?)^'$", SBATCH.read_text(), re.M | re.S)
    task = tmp_path / "task.sh"
    task.write_text("#!/bin/bash\n" + node)
    shellcheck = Path(sys.executable).parent / "shellcheck"
    for script in (SBATCH, pod, coordinator, task):
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


def test_the_launch_recipes_are_packaged() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    packaged = {path for pattern in data["checkpointless.recipes"] for path in (ROOT / "recipes").glob(pattern)}
    assert set(LAUNCH.iterdir()) <= packaged
