"""Test that the agent's loop goes on when the disk of its ranks' logs does not answer, or refuses."""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpointless.agent.ranks.rank_log import LogCopies, LogFolder, RankLog
from checkpointless.posix.errands import Errands
from tests.descriptors import descriptors


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[Path]:
    """Yield a file that nobody can open, to write or to read, until the test is over."""
    path = tmp_path / "rank-3.log"
    os.mkfifo(path)
    yield path
    both = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    os.close(both)


def test_an_errand_brings_its_result_or_its_error() -> None:
    errands = Errands()
    assert errands.run(lambda: 1, 2) == 1

    def fails() -> int:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        errands.run(fails, 2)
    assert errands.run(lambda: 1, 2) == 1


def test_what_takes_too_long_is_waited_for_once_and_its_result_is_not_lost() -> None:
    errands = Errands(patience_s=0.1)
    gate, came = threading.Event(), threading.Event()
    late: list[bool] = []

    def take(result: bool) -> None:
        late.append(result)
        came.set()

    assert errands.run(lambda: gate.wait(60), False, late=take) is False
    began: list[int] = []
    assert errands.run(lambda: began.append(1), None) is None
    assert not began, "it was begun beside the first one"
    gate.set()
    assert came.wait(10)
    assert late == [True]
    assert errands.run(lambda: 1, 2) == 1


def test_without_threads_an_errand_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    errands = Errands()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        assert errands.run(lambda: 1, 2) == 2
    assert errands.run(lambda: 1, 2) == 1


def test_the_end_of_what_was_printed(tmp_path: Path) -> None:
    said: list[str] = []
    log = RankLog(tmp_path / "rank-3.log", Errands(), said.append)
    for text in (b"of an earlier process\n", b"first\nsecond\nthird"):
        descriptor = log.open()
        os.write(descriptor, text)
        os.close(descriptor)
    assert log.last_lines(2) == ["second", "third"]
    assert log.last_lines() == ["first", "second", "third"]
    log.path.write_bytes(b"cut off\n")
    assert log.last_lines() == ["cut off"]
    log.path.write_bytes(b"x" * 20_000 + b"\nlast\n")
    assert log.last_lines(1) == ["last"]
    assert not said


def test_a_rank_is_started_while_its_disk_does_not_answer(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    said: list[str] = []
    log = RankLog(stopped, Errands(patience_s=0.1), said.append)
    descriptor = log.open()
    os.write(descriptor, b"why it died\n")
    os.close(descriptor)
    assert said == [
        f"{stopped} cannot be written: its disk does not answer; what the rank prints is not kept there"
    ]
    assert log.last_lines() == ["why it died"]
    assert list(temporary.iterdir()) == []
    before = descriptors()
    log.close()
    assert [target.startswith(f"{temporary}/") for _, target in before - descriptors()].count(True) == 1


def test_the_end_of_a_log_on_a_disk_that_does_not_answer(stopped: Path) -> None:
    log = RankLog(stopped, Errands(patience_s=0.1), lambda line: None)
    assert log.last_lines() == [f"{stopped} cannot be read: its disk does not answer"]


def test_a_log_that_is_refused_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    log = RankLog(tmp_path / "gone" / "rank-3.log", Errands(), said.append)
    os.close(log.open())
    assert "No such file or directory" in said[0]
    assert log.last_lines() == []
    log.close()
    assert log.last_lines() == [f"{log.path} cannot be read: No such file or directory"]


def test_a_rank_is_started_though_nothing_can_be_written_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    log = RankLog(tmp_path / "gone" / "rank-3.log", Errands(), lambda line: None)
    descriptor = log.open()
    assert os.write(descriptor, b"lost") == 4
    os.close(descriptor)


def test_what_ranks_print_is_copied_to_its_end(tmp_path: Path) -> None:
    paths = {rank: tmp_path / f"rank-{rank}.log" for rank in (0, 1)}
    for path in paths.values():
        path.write_text("")
    out = io.StringIO()
    copies = LogCopies(paths, out, Errands())
    paths[1].write_bytes(b"one\ntwo\n")
    paths[0].write_bytes(
        "".join(f"line {number}\n" for number in range(1000)).encode()
    )  # at once, no part of a line
    assert copies.stop()
    lines = out.getvalue().splitlines()
    assert [line for line in lines if line.startswith("[rank 1] ")] == ["[rank 1] one", "[rank 1] two"]
    assert len(lines) == 1002


class _Writes(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return len(text)

    def come_to(self, *pieces: str) -> None:
        deadline_s = time.monotonic() + 20
        while self.pieces != list(pieces):
            assert time.monotonic() < deadline_s, self.pieces
            time.sleep(0.01)


def test_a_progress_bar_is_copied_in_whole_lines_that_nothing_is_added_to(tmp_path: Path) -> None:
    out = _Writes()
    with (tmp_path / "rank-0.log").open("w", newline="") as log:
        copies = LogCopies({0: tmp_path / "rank-0.log"}, out, Errands())
        log.write("  5%\r 10")
        log.flush()
        out.come_to("[rank 0]   5%\n")
        log.write("%")
        log.flush()
        out.come_to("[rank 0]   5%\n", "[rank 0]  10%\n")  # after a while, and ended
        log.write("\r 15%")
        log.flush()
        assert copies.stop()
    assert out.pieces == ["[rank 0]   5%\n", "[rank 0]  10%\n", "[rank 0]  15%\n"]


def test_the_copies_of_a_log_on_a_disk_that_does_not_answer_are_not_waited_for(stopped: Path) -> None:
    assert not LogCopies({3: stopped}, io.StringIO(), Errands(patience_s=0.1)).stop()


def test_what_a_lost_predecessor_printed_is_moved_away(tmp_path: Path) -> None:
    logs = LogFolder(tmp_path)
    logs.make()
    for text in ("first", "second"):
        assert logs.begin([0])
        logs.of_rank(0).write_text(text)
    assert logs.begin([0])
    assert logs.of_rank(0).read_text() == ""
    kept = {path.name: path.read_text() for path in (tmp_path / "logs").glob("rank-0.*.log")}
    assert kept == {"rank-0.1.log": "first", "rank-0.2.log": "second"}
