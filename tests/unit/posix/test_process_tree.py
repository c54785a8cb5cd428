"""What a rank's processes leave in shared memory goes with them, and nothing else does."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkpointless.system import temp_folder
from checkpointless.system.process_tree import ProcessLook, ProcessTree, kill_descendants

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
    group = ProcessTree(leader.pid, None)
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
