"""Test which processes count as idle."""

import os
import subprocess
import sys
import time

import pytest

from checkpointless.system import process_tree
from checkpointless.system.process_tree import Idleness, families

WORKS = "import time\nwhile True: pass"
WRITES = "import time\nwhile True: open('/dev/null', 'wb').write(bytes(1 << 20)); time.sleep(0.2)"
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(WORKS,), (WRITES,), (PARENT, WORKS)])
def test_what_computes_or_writes_or_has_a_child_that_does_is_not_idle(arguments: tuple[str, ...]) -> None:
    with subprocess.Popen([sys.executable, "-c", *arguments]) as process:
        pid = process.pid
        began_s = time.monotonic()
        looks = Idleness(0.0, lambda: families([pid])[pid])
        seen = 0
        while seen < 5:  # the beginning of the interpreters is less
            time.sleep(0.5)
            passed_s = time.monotonic() - began_s
            seen += looks.seconds(passed_s) == 0.0
            assert passed_s < 120
        for each in reversed(families([pid])[pid]):
            os.kill(each, 9)


class Used:
    """Says what a process has used."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cpu_s, self.bytes, self.letter = 0.0, 0, "S"
        monkeypatch.setattr(process_tree.ProcessLook, "at", lambda _: self.look())
        monkeypatch.setattr(process_tree, "_bytes", lambda _: self.bytes)

    def look(self) -> process_tree.ProcessLook:
        return process_tree.ProcessLook(ord(self.letter), family_ms=round(1000 * self.cpu_s))


def test_a_thread_that_looks_now_and_then_is_idle_and_an_upload_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    used = Used(monkeypatch)
    looks = Idleness(0.0, lambda: [1])
    for second in range(1, 31):
        used.cpu_s += 0.001
        assert looks.seconds(second) == second
    used.cpu_s += 0.2
    assert looks.seconds(31) == 0
    assert looks.seconds(40) == 9
    used.bytes += 10 << 20
    assert looks.seconds(41) == 0


@pytest.mark.parametrize("letter", "Dt")
def test_who_waits_for_a_disk_or_a_debugger_is_not_idle(monkeypatch: pytest.MonkeyPatch, letter: str) -> None:
    used = Used(monkeypatch)
    looks = Idleness(0.0, lambda: [1])
    used.letter = letter
    assert looks.seconds(50) == 0
