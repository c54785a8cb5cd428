"""Test what is known of processes, and that what they leave in shared memory goes with them, and nothing else."""

import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkpointless.system import process_tree, temp_folder
from checkpointless.system.process_tree import Idleness, ProcessLook, ProcessState, families, kill_descendants

NOBODY = 4194305 + os.getpid()  # no pid is as large, and no other test uses it

LEADER_AND_CHILD = """
import os, sys, time
os.fork()
path = f"/dev/shm/torch_{os.getpid()}_{sys.argv[1]}_0"
descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
os.write(1, b"ready\\n")  # in one piece
time.sleep(60)
"""


@pytest.fixture
def file_of() -> Iterator[Callable[[int], Path]]:
    """Return a function that makes a file with the name that torch gives to one of a process."""
    made: list[Path] = []

    def make(pid: int) -> Path:
        path = temp_folder.SHARED_MEMORY / f"torch_{pid}_{os.getpid()}_{len(made)}"
        path.touch(0o600)
        made.append(path)
        return path

    yield make
    for path in made:
        path.unlink(missing_ok=True)


def test_a_file_that_somebody_uses_stays(file_of: Callable[[int], Path]) -> None:
    """A process in another container may have the same pid."""
    path = file_of(NOBODY)
    with path.open("r+b") as file:
        file.truncate(mmap.PAGESIZE)
        temp_folder.remove_shared([NOBODY])
        assert path.exists()
        mapped = mmap.mmap(file.fileno(), mmap.PAGESIZE)
    temp_folder.remove_shared([NOBODY])
    assert path.exists()
    mapped.close()
    temp_folder.remove_shared([NOBODY])
    assert not path.exists()


def test_what_is_no_file_of_ours_stays(file_of: Callable[[int], Path], tmp_path: Path) -> None:
    path = file_of(NOBODY)
    (tmp_path / "victim").touch()
    path.unlink()
    path.symlink_to(tmp_path / "victim")
    temp_folder.remove_shared([NOBODY])
    assert path.is_symlink()
    path.unlink()
    os.mkfifo(path)
    temp_folder.remove_shared([NOBODY])
    assert path.exists()


@pytest.mark.parametrize("twice", [False, True], ids=["once", "and-again"])
def test_a_group_is_killed_and_what_it_had_in_shared_memory_goes(twice: bool) -> None:
    mark = f"{os.getpid()}{time.monotonic_ns()}"
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER_AND_CHILD, mark], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert leader.stdout is not None
    assert leader.stdout.readline() == leader.stdout.readline() == "ready\n"
    assert len(list(temp_folder.SHARED_MEMORY.glob(f"torch_*_{mark}_0"))) == 2
    group = process_tree.ProcessTree(leader.pid, None)
    group.kill()
    if twice:  # a hung rank is killed, and is seen to have ended later, when the child is not there any more
        os.waitid(os.P_PID, leader.pid, os.WEXITED | os.WNOWAIT)
        assert leader.stdout.read() == ""
        group.kill()
    leader.wait()
    group.clean()
    assert leader.stdout.read() == "", "the child has ended"
    assert list(temp_folder.SHARED_MEMORY.glob(f"torch_*_{mark}_0")) == []


BRANCHES = """
import os, sys, time
from checkpointless.launcher.agent.ranks.zygote import _adopt_orphans
_adopt_orphans()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()  # its parent ends, so it is an orphan, in a session of its own
        os.write(1, b"%d\\n" % os.getpid())
        time.sleep(60)
    os._exit(0)
time.sleep(60)
"""


def test_whoever_adopts_orphans_has_all_that_it_led_to_below() -> None:
    with subprocess.Popen([sys.executable, "-c", BRANCHES], stdout=subprocess.PIPE, text=True) as root:
        assert root.stdout is not None
        orphan = int(root.stdout.readline())
        try:
            while ProcessLook.at(orphan).parent != root.pid:
                time.sleep(0.01)
            assert not kill_descendants(orphan)
            assert kill_descendants(root.pid)
            while chr(ProcessLook.at(orphan).letter) != "Z":
                time.sleep(0.01)
            assert root.poll() is None
        finally:
            root.kill()


# ---- what the kernel says of a process


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
        if ProcessLook.at(process.pid).state_since(first, 0.2) is state:
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
        return ProcessLook(ord(letter), cpu_ms).state_since(ProcessLook(ord(letter), 0), 1.0)

    states = ["STOPPED", "TRACED", "BLOCKED", "BUSY", "IDLE", "IDLE"]
    assert [seen(letter).name for letter in "TtDRSI"] == states
    assert seen("S", 500) is ProcessState.BUSY
    assert ProcessLook().state_since(ProcessLook(), 1.0) is ProcessState.UNKNOWN
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


# ---- which processes are idle


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
        monkeypatch.setattr(ProcessLook, "at", lambda _: self.look())
        monkeypatch.setattr(process_tree, "_bytes", lambda _: self.bytes)

    def look(self) -> ProcessLook:
        return ProcessLook(ord(self.letter), family_ms=round(1000 * self.cpu_s))


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
