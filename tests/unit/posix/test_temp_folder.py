"""What ranks' processes leave in their temporary folders goes with them, or with the next agent."""

from __future__ import annotations

import errno
import fcntl
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

from checkpointless.inprocess.abort import _remove_unused_sockets, share_socket_folder
from checkpointless.system import temp_folder
from checkpointless.system.temp_folder import private_temp_folder


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Provide a folder for temporary files with a short path."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    yield path
    shutil.rmtree(path)


def test_it_is_private_and_ends_with_the_agent(temporary: Path) -> None:
    with private_temp_folder() as folder:
        assert folder is not None
        assert folder.parent == temporary
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "7").mkdir()
        (folder / "7" / "left").touch()
        (folder / "8").mkdir()
        temp_folder.remove(folder, 7)
        temp_folder.remove(folder, 7)
        assert [path.name for path in folder.glob("*") if path.is_dir()] == ["8"]
    assert list(temporary.iterdir()) == []


def test_that_of_a_killed_agent_goes_with_the_next_one_and_no_other_does(temporary: Path) -> None:
    begin = "import time; from checkpointless.system.temp_folder import *; x = private_temp_folder()"
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
        with private_temp_folder():
            assert not killed.exists()
            assert not never_locked.exists()
            assert living.is_dir()
            assert elsewhere.is_dir()
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate()


def test_a_folder_that_another_agent_removes_at_once_is_made_again(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really, made = tempfile.mkdtemp, []

    def mkdtemp(prefix: str, dir: Path) -> str:
        path = really(prefix=prefix, dir=dir)
        made.append(path)
        if len(made) == 1:
            shutil.rmtree(path)
        return path

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    with private_temp_folder() as folder:
        assert folder == Path(made[1])


def test_too_long_a_path_means_pythons_own_folders(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = temporary / ("d" * 80)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with private_temp_folder() as folder:
        assert folder is None
        temp_folder.use(folder)
        temp_folder.remove(folder, 1)
    assert list(deep.iterdir()) == []


def test_sockets_are_told_apart_by_their_whole_path(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = temporary / "of two words"
    folder.mkdir()
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", str(folder))  # type: ignore[attr-defined]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "listener-12345678"))
        _remove_unused_sockets()
        assert (folder / "listener-12345678").exists()
    _remove_unused_sockets()
    assert not (folder / "listener-12345678").exists()


def test_where_nothing_can_be_made_the_job_goes_on(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "missing"))
    with private_temp_folder() as folder:
        assert folder is None
    assert "no temporary folder for the ranks" in caplog.text


def test_where_there_is_no_place_for_temporary_files_the_job_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/nowhere"])
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", None)  # type: ignore[attr-defined]
    with private_temp_folder() as folder:
        assert folder is None
    share_socket_folder()
    assert caplog.text.count("No usable temporary directory") == 2


def test_where_nothing_can_be_locked_nothing_is_left(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with private_temp_folder() as folder:
        assert folder is None
    assert "No locks available" in caplog.text
    assert list(temporary.iterdir()) == []


def rank(folder: Path) -> None:
    temp_folder.use(folder)
    of_its_worker = multiprocessing.get_context("fork").Process(target=say_where, args=(folder,))
    of_its_worker.start()
    of_its_worker.join(60)
    os.kill(os.getpid(), signal.SIGKILL)


def say_where(folder: Path) -> None:
    (folder / "where").write_text(util.get_temp_dir())


def test_a_rank_and_what_it_starts_have_one_folder_which_is_known_by_its_pid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", None)  # type: ignore[attr-defined]
    with private_temp_folder() as folder:
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
