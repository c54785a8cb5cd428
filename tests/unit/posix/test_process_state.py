"""Test what is made of the kernel's words on a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpointless.system.process_tree import ProcessLook, ProcessState, state_of


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    made = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield made
    made.kill()
    made.wait()


def _until(process: subprocess.Popen[bytes], state: ProcessState) -> None:
    deadline = time.monotonic() + 30
    while True:
        first = ProcessLook.at(process.pid)
        time.sleep(0.2)
        if state_of(first, ProcessLook.at(process.pid), 0.2) is state:
            return
        assert time.monotonic() < deadline, state


def test_a_process_that_sleeps_or_is_stopped_is_seen(process: subprocess.Popen[bytes]) -> None:
    _until(process, ProcessState.IDLE)
    os.kill(process.pid, signal.SIGSTOP)
    _until(process, ProcessState.STOPPED)
    os.kill(process.pid, signal.SIGCONT)
    _until(process, ProcessState.IDLE)


def test_what_the_kernel_says_of_a_process() -> None:
    def seen(letter: str, cpu_ms: int = 0) -> ProcessState:
        return state_of(ProcessLook(ord(letter), 0), ProcessLook(ord(letter), cpu_ms), 1.0)

    assert [seen(letter) for letter in "TtDRSI"] == [
        ProcessState.STOPPED,
        ProcessState.TRACED,
        ProcessState.BLOCKED,
        ProcessState.BUSY,
        ProcessState.IDLE,
        ProcessState.IDLE,
    ]
    assert seen("S", 500) is ProcessState.BUSY
    assert state_of(ProcessLook(), ProcessLook(), 1.0) is ProcessState.UNKNOWN
    assert ProcessLook.at(None) == ProcessLook()
    assert ProcessLook.at(os.getpid()).cpu_ms > 0


def test_a_process_may_have_any_name() -> None:
    name = Path("/proc/self/comm")
    before = name.read_bytes()
    name.write_bytes(b"\xff) T 1\n")
    try:
        assert ProcessLook.at(os.getpid()).parent == os.getppid()
    finally:
        name.write_bytes(before)
