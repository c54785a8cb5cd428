"""Read and run what is in recipes/launch, with stand-ins for what Slurm and Kubernetes bring."""

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from checkpointless.cli import command_line
from checkpointless.launcher.coordinator.job_config import DEFAULT_PORT
from checkpointless.system.environment import TOKEN_ENV
from tests.ports import free_port

ROOT = Path(__file__).parents[4]
LAUNCH = ROOT / "recipes" / "launch"
SBATCH = LAUNCH / "slurm.sbatch"
PORT = free_port(DEFAULT_PORT, DEFAULT_PORT + 999)
JOB = f"4{PORT - DEFAULT_PORT:03}"  # the batch script derives its port from it
POD_FILES = ("jobset.yaml", "trainingruntime.yaml")


def loaded(name: str) -> Any:
    return yaml.safe_load((LAUNCH / name).read_text())


def set_of(name: str) -> dict[str, Any]:
    spec = loaded(name)["spec"]
    return spec if "replicatedJobs" in spec else spec["template"]["spec"]  # type: ignore[no-any-return]


def job_of(name: str, job: str = "node") -> dict[str, Any]:
    """Return one of the two Jobs that the file has JobSet make."""
    (replicated,) = (each for each in set_of(name)["replicatedJobs"] if each["name"] == job)
    assert replicated["replicas"] == 1
    return replicated["template"]["spec"]  # type: ignore[no-any-return]


def container_of(name: str, job: str = "node") -> dict[str, Any]:
    (container,) = job_of(name, job)["template"]["spec"]["containers"]
    assert container["name"] == job
    return container  # type: ignore[no-any-return]


def script_of(name: str, job: str = "node") -> str:
    container = container_of(name, job)
    words = [*container["command"], *container.get("args", [])]
    assert words[:2] == ["bash", "-c"]
    return str(words[2])


def task_script() -> str:
    """Return what the batch script runs on each node."""
    (node,) = re.findall(r"^node='\n(.*?)^'$", SBATCH.read_text(), re.M | re.S)
    return str(node)


def env_of(name: str, job: str = "node") -> dict[str, Any]:
    return {each["name"]: each for each in container_of(name, job)["env"]}


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
# It listens, and does what FAKE_COORDINATOR says: a word for each start, the last for all further ones. `killed`
# dies of SIGKILL once a node has run, `deaf` stays whatever happens, and a number is its exit status once all have.
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


def put(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def options_of(argv: Path) -> argparse.Namespace:
    """Return what the command line makes of the words that the fake agent got."""
    options, extra = command_line._parser().parse_known_args(shlex.split(argv.read_text()))
    assert not extra
    return options


def environment_of(tmp_path: Path, **more: str) -> dict[str, str]:
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    return {"PATH": path, "PYTHON": sys.executable, "FAKE_DIR": str(tmp_path), "FAKE_COORDINATOR": "0", **more}


def pod_environment(tmp_path: Path, index: int, **more: str) -> dict[str, str]:
    job = {"NNODES": "4", "SPARES": "1", "NPROC": "8", "COORDINATOR": "train-coordinator-0-0.train"}
    pod = {"JOB_COMPLETION_INDEX": str(index), "POD_IP": "10.0.0.7", "RUN_DIR": str(tmp_path / "run")}
    return environment_of(tmp_path, **{**job, **pod, TOKEN_ENV: "t" * 32, **more})


def run_pod(tmp_path: Path, index: int, **more: str) -> int:
    words = ["bash", "-c", script_of("jobset.yaml"), "node", "train.py", "--lr", "1e-3"]
    return subprocess.run(words, env=pod_environment(tmp_path, index, **more), timeout=30).returncode


def run_coordinator(tmp_path: Path, **more: str) -> int:
    env, words = pod_environment(tmp_path, 0, **more), ["bash", "-c", script_of("jobset.yaml", "coordinator")]
    (tmp_path / "argv-0").touch()  # it looks as if all nodes had run
    return subprocess.run(words, env=env, timeout=30, stdout=subprocess.DEVNULL).returncode


def sbatch_env(tmp_path: Path, **more: str) -> dict[str, str]:
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
        'until [ "$(wc -l < "$FAKE_DIR/coordinated")" -ge "${FAKE_COORDINATORS:-0}" ]; do sleep 0.1; done\n'
        'sleep "${FAKE_LONGER:-0}"\nexit 1\n',
    )
    nodes = {"SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "node-[a-c]", "BATCH_LOST": "1"}
    job = {"SLURM_JOB_NAME": "checkpointless", "SLURM_JOB_ID": JOB}
    return environment_of(tmp_path, **{**nodes, **job, **more})


def run_sbatch(tmp_path: Path, **more: str) -> subprocess.CompletedProcess[str]:
    env, words = sbatch_env(tmp_path, **more), ["bash", str(SBATCH)]
    return subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)


def coordinated(tmp_path: Path) -> list[str]:
    return (tmp_path / "coordinated").read_text().splitlines()
