"""Test the log files of bounded size, on disks that refuse, and the whole lines that are shown."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkpointless.launcher.agent.ranks.output import FILES, _LineCopy, _LogFile

MOST = 4000


@pytest.fixture
def complaints() -> list[str]:
    return []


@pytest.fixture
def limited() -> Iterator[Callable[[int], None]]:
    """Let no file of this process grow beyond a number of bytes until it is set higher: a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda most: resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def texts(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_full_file_becomes_an_older_one_and_the_oldest_is_deleted(tmp_path: Path, complaints: list[str]) -> None:
    log = _LogFile(tmp_path / "rank-3.log", MOST, complaints.append, is_new=True)
    lines = [f"line {number:4}\n" for number in range(1000)]
    for at in range(0, 1000, 7):
        log.write("".join(lines[at : at + 7]).encode(), 0)
    log.close()
    files = texts(tmp_path)
    assert len(files) == FILES
    assert all(len(text) <= MOST // FILES for text in files.values())
    names = sorted(files, key=lambda name: (name == "rank-3.log", name))
    kept = "".join(files[name] for name in names)
    assert len(kept) > MOST // 2
    assert "".join(lines).endswith(kept), "a gap, or another order"
    assert all(text.endswith("\n") for text in files.values()), "a line was cut"
    assert complaints == []


def test_what_a_predecessor_printed_is_kept_or_continued(tmp_path: Path, complaints: list[str]) -> None:
    for text, is_new in ((b"first\n", True), (b"second\n", True), (b"third\n", False)):
        log = _LogFile(tmp_path / "rank-3.log", MOST, complaints.append, is_new=is_new)
        log.write(text, 0)
        log.close()
    assert texts(tmp_path) == {"rank-3.1.log": "first\n", "rank-3.log": "second\nthird\n"}


def test_what_a_full_disk_refuses_is_counted_and_named_when_there_is_room(
    tmp_path: Path, complaints: list[str], limited: Callable[[int], None]
) -> None:
    log = _LogFile(tmp_path / "rank-3.log", MOST, complaints.append, is_new=True)
    limited(10)
    log.write(b"before\n" + b"z" * 93, 0)  # 10 of these 100 bytes
    log.write(b"lost\n", 7)
    assert set(complaints) == {"File too large"}
    limited(resource.RLIM_INFINITY)
    log.write(b"", 0)
    log.write(b"after\n", 0)
    log.close()
    gap = "[checkpointless: 102 bytes of output are missing here]"
    assert texts(tmp_path) == {"rank-3.log": f"before\nzzz\n{gap}\nafter\n"}


class Shown:
    """Shows what one rank prints; ``portions`` is what was written at once."""

    def __init__(self) -> None:
        self.portions: list[bytes] = []
        self.copy = _LineCopy("rank 0", self.portions.append, Path("logs/rank-0.log"))

    def __call__(self, data: bytes, lost: int = 0) -> bytes:
        before = len(self.portions)
        self.copy.write(data, lost)
        return b"".join(self.portions[before:])


@pytest.fixture
def shown() -> Shown:
    return Shown()


def test_only_whole_lines_are_shown_each_after_its_rank(shown: Shown) -> None:
    assert shown(b"one\ntw") == b"[rank 0] one\n"
    assert shown(b"o\n\nthree") == b"[rank 0] two\n[rank 0] \n"
    shown.copy.close()
    assert shown.portions[-1] == b"[rank 0] three\n"


def test_the_states_of_a_progress_bar_are_lines(shown: Shown) -> None:
    assert shown(b"  5%\r 10") == b"[rank 0]   5%\n"
    assert shown(b"%") == b""
    assert shown(b"\r 15%\r") == b"[rank 0]  10%\n[rank 0]  15%\n"
    assert shown(b"\n") == b"", "one end of a line, in two portions"
    assert shown(b"a\r\nb\r") == b"[rank 0] a\n[rank 0] b\n"
    assert shown(b"\n") + shown(b"\n") == b"[rank 0] \n"


def test_a_long_line_is_shown_in_pieces_and_not_kept(shown: Shown) -> None:
    for _ in range(20):
        shown(b"." * 50_000)
    shown(b"\n")
    text = b"".join(shown.portions)
    assert text.count(b".") == 1_000_000
    lines = text.splitlines()
    assert max(map(len, lines)) <= 64 * 1024 + len("[rank 0] ")
    assert len(lines) < 40
    assert shown(b"!" * 200_000 + b"\n").count(b"\n") == 4


def test_what_is_left_out_is_a_line_of_its_own(shown: Shown) -> None:
    told = b"[rank 0] (70 bytes are left out here; they are in logs/rank-0.log)\n"
    assert shown(b"one\ntw", 70) == b"[rank 0] one\n[rank 0] tw\n" + told
    assert shown(b"rest\n") == b"[rank 0] rest\n"
