"""Run the shell scripts of the pods, with a `checkpointless` that writes down its arguments."""

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

from checkpointless.cli import command_line
from checkpointless.system.environment import TOKEN_ENV
from tests.unit.recipes.launch.manifests import script_of

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
    """Run a pod's script and return its exit status."""
    words = ["bash", "-c", script_of("jobset.yaml"), "node", "train.py", "--lr", "1e-3"]
    return subprocess.run(words, env=pod_environment(tmp_path, index, **more), timeout=30).returncode


def run_coordinator(tmp_path: Path, **more: str) -> int:
    """Run the script of the coordinator's pod and return its exit status."""
    words = ["bash", "-c", script_of("jobset.yaml", "coordinator")]
    environment = pod_environment(tmp_path, 0, **more)
    (tmp_path / "argv-0").touch()  # it looks as if all nodes had run
    return subprocess.run(words, env=environment, timeout=30, stdout=subprocess.DEVNULL).returncode
