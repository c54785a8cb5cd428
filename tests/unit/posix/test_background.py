"""Test that a process that stood behind others for a time is as before afterwards, with all its threads."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from checkpointless.posix import background

CODE = """
import contextlib, os, sys, threading
from pathlib import Path
from checkpointless.posix import background

if sys.argv[1] == "without-privileges":
    background._may_come_back = lambda before: False

def state():
    tasks = [int(task) for task in os.listdir("/proc/self/task")]
    nice = {os.getpriority(os.PRIO_PROCESS, task) for task in tasks}
    return nice, {os.sched_getscheduler(task) for task in tasks}, Path("/proc/self/oom_score_adj").read_text()

before = state()
going = threading.Event()
with background.low_priority(), background.first_to_go():
    thread = threading.Thread(target=going.wait)
    thread.start()
    print(*state()[0], *state()[1], int(state()[2]) - int(before[2]))
print(state() == before, threading.active_count())
going.set()
"""


@pytest.mark.parametrize("side", ["with-privileges", "without-privileges"])
def test_everything_is_as_before_afterwards(side: str) -> None:
    if side == "with-privileges" and not background._may_come_back(os.getpriority(os.PRIO_PROCESS, 0)):
        pytest.skip("this process may not raise its priority")
    done = subprocess.run([sys.executable, "-c", CODE, side], capture_output=True, text=True, timeout=60)
    meanwhile, after = done.stdout.splitlines()
    nice, policy = ("10", os.SCHED_OTHER) if side == "with-privileges" else ("0", os.SCHED_BATCH)
    assert meanwhile.split()[:2] == [nice, str(policy)], done.stderr
    assert int(meanwhile.split()[2]) in (0, 500)  # where the kernel has no such file, nothing changes
    assert after == "True 2"


def test_a_process_knows_its_private_memory() -> None:
    """In a process of its own: threads of other tests may take memory meanwhile."""
    code = (
        "import os\n"
        "from checkpointless.posix import background\n"
        "before = background.private_bytes()\n"
        "block = bytearray(os.urandom(1 << 20)) * 32\n"
        "print(background.private_bytes() - before, len(block))\n"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    grown, length = map(int, said.stdout.split())
    assert length == 2**25
    assert 30 * 2**20 < grown < 40 * 2**20
