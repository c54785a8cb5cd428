"""Test the kinds of fault that end or stop a process, in processes that they end or stop."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from checkpointless.faults.inject import INJECTED_EXIT_CODE
from checkpointless.faults.ledger import fired
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import read_events
from tests.waiting import wait_until

pytestmark = pytest.mark.ranks

_RANK = """
from checkpointless.faults.inject import FaultInjector
from checkpointless.faults.spec import FaultPhase
injector = FaultInjector.from_environment(1)
for step in range(1, 6):
    injector.at(FaultPhase.BACKWARD, step, 0)
    print(step, flush=True)
"""


def start(run_dir: Path, spec: str) -> "subprocess.Popen[str]":
    environment = {
        **os.environ,
        "RANK": "1",
        "CHECKPOINTLESS_RUN_DIR": str(run_dir),
        "CHECKPOINTLESS_FAULTS": json.dumps([spec]),
    }
    return subprocess.Popen([sys.executable, "-c", _RANK], env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("sigkill", -signal.SIGKILL),
        ("sigterm", -signal.SIGTERM),
        ("segfault", -signal.SIGSEGV),
        ("exit", INJECTED_EXIT_CODE),
        ("exception", 1),
    ],
)
def test_a_process_dies_once_and_its_successor_lives(kind: str, code: int, tmp_path: Path) -> None:
    spec = f"{kind}@backward:rank=1,step=3"
    first = start(tmp_path, spec)
    printed, _ = first.communicate(timeout=180)
    assert first.returncode == code
    assert printed.split() == ["1", "2"]
    (event,) = read_events(tmp_path)
    assert (event.stage, event.rank, event.fields["spec"]) == (EventName.FAULT_INJECTED, 1, spec)

    successor = start(tmp_path, spec)
    printed, _ = successor.communicate(timeout=180)
    assert successor.returncode == 0
    assert printed.split() == ["1", "2", "3", "4", "5"]
    assert fired(tmp_path) == {spec: 1}


def test_a_hang_sleeps_and_does_not_end(tmp_path: Path) -> None:
    hung = start(tmp_path, "hang@backward:rank=1,step=2")
    try:
        wait_until(lambda: read_events(tmp_path))
        time.sleep(0.3)
        assert hung.poll() is None
        assert Path(f"/proc/{hung.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"
    finally:
        hung.kill()
        printed, _ = hung.communicate(timeout=180)
    assert printed.split() == ["1"]
