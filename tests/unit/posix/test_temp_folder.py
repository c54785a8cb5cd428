"""What ranks' processes leave in their temporary folders goes with them, or with the next agent."""

import multiprocessing
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import util
from pathlib import Path

import pytest

from checkpointless.system import temp_folder
from checkpointless.system.temp_folder import private_folder


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Provide a folder for temporary files with a short path."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    yield path
    shutil.rmtree(path)


def test_it_is_private_and_ends_with_the_agent(temporary: Path) -> None:
    with private_folder() as folder:
        assert folder is not None
        assert (folder.parent, stat.S_IMODE(folder.stat().st_mode)) == (temporary, 0o700)
        (folder / "7").mkdir()
        (folder / "7" / "left").touch()
        (folder / "8").mkdir()
        temp_folder.remove(folder, 7)
        temp_folder.remove(folder, 7)
        assert [path.name for path in folder.glob("*") if path.is_dir()] == ["8"]
    assert list(temporary.iterdir()) == []


def test_that_of_a_killed_agent_goes_with_the_next_one_and_no_other_does(temporary: Path) -> None:
    begin = "import time; from checkpointless.system.temp_folder import *; x = private_folder()"
    script = f"{begin}; print(x.__enter__(), flush=True); time.sleep(60)"
    command = [sys.executable, "-c", script]
    env = {**os.environ, "TMPDIR": str(temporary)}
    agents = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) for _ in range(2)]
    killed, living = (Path(agent.stdout.readline().strip()) for agent in agents if agent.stdout is not None)
    elsewhere = temporary / "ckpl-OthersKernel12"  # its lock may not be known here
    elsewhere.mkdir()
    never_locked = Path(tempfile.mkdtemp(prefix=killed.name[:-8]))  # its agent was killed before it could do it
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(killed / "listener-12345678"))
        agents[0].send_signal(signal.SIGKILL)
        agents[0].wait()
        assert killed.is_dir()
        with private_folder():
            assert not killed.exists()
            assert not never_locked.exists()
            assert living.is_dir()
            assert elsewhere.is_dir()
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate()


def test_where_nothing_can_be_made_the_job_goes_on(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "missing"))
    with private_folder() as folder:
        assert folder is None
    assert "no temporary folder for the ranks" in caplog.text


def rank(folder: Path) -> None:
    temp_folder.use(folder)
    of_its_worker = multiprocessing.get_context("fork").Process(target=say_where, args=(folder,))
    of_its_worker.start()
    of_its_worker.join(60)
    os.kill(os.getpid(), signal.SIGKILL)


def say_where(folder: Path) -> None:
    (folder / "where").write_text(util.get_temp_dir())


def test_a_rank_and_what_it_starts_have_one_folder_that_its_pid_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", None)  # type: ignore[attr-defined]
    with private_folder() as folder:
        assert folder is not None
        process = multiprocessing.get_context("fork").Process(target=rank, args=(folder,))
        process.start()
        process.join(60)
        where = Path((folder / "where").read_text())
        assert where.parent == folder / str(process.pid)
        assert where.is_dir()
        assert len(str(where / "listener-12345678")) <= 107
        temp_folder.remove(folder, process.pid or 0)
        assert not where.exists()
        assert tempfile.gettempdir() == str(folder.parent)
