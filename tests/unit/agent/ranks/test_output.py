"""Test that what ranks print is kept in files of bounded size and shown, and that no rank waits for that."""

import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpointless.launcher.agent.ranks import output as output_module
from checkpointless.launcher.agent.ranks.output import FILES, Output, Printed, _LineCopy, _LogFile
from tests.descriptors import descriptors
from tests.waiting import wait_until

PLENTY = 20_000_000


class Node:
    """Provides the output of a node with two ranks."""

    def __init__(self, folder: Path, new_logs: tuple[int, ...] = (0, 1)) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.terminal, self.shown = os.pipe()
        shows: dict[str, Any] = {"terminal": self.shown, "shown": (0, 1), "say": self.said.append}
        self.output = Output(folder, None, 1 << 30, new_logs=new_logs, **shows)
        self.ranks = [self.output.of_rank(rank) for rank in (0, 1)]
        self._is_open = True

    def start(self) -> None:
        self.output.start()

    def end(self) -> None:
        if self._is_open:
            self._is_open = False
            self.output.close()
            os.close(self.shown)

    def log(self, rank: int) -> str:
        path = self.folder / f"rank-{rank}.log"
        return path.read_text() if path.exists() else ""

    def read_terminal(self) -> str:
        with open(self.terminal, "rb", closefd=False) as terminal:
            return terminal.read().decode()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.end()
    os.close(made.terminal)


def pour(printed: Printed, nbytes: int) -> threading.Thread:
    """Print in a thread, as a rank does; it ends once everything was taken."""
    descriptor = printed.begin()

    def run() -> None:
        line = b"x" * 99 + b"\n"
        for _ in range(nbytes // 100_000):
            os.write(descriptor, line * 1000)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_what_is_printed_is_kept_and_shown_to_its_end(node: Node) -> None:
    os.write(node.ranks[1].begin(), b"before anyone reads\n")
    node.start()
    os.write(node.ranks[0].begin(), "".join(f"line {number}\n" for number in range(1000)).encode())
    os.write(node.ranks[1].begin(), b"last")
    os.write(node.output.fork_server.begin(), b"imported\n")
    node.end()
    assert node.log(0).splitlines() == [f"line {number}" for number in range(1000)]
    assert (node.log(1), (node.folder / "zygote.log").read_text()) == ("before anyone reads\nlast", "imported\n")
    shown = node.read_terminal().splitlines()
    assert [line for line in shown if "[rank 1]" in line] == ["[rank 1] before anyone reads", "[rank 1] last"]
    assert (len(shown), node.said) == (1002, [])


def test_the_last_lines_are_those_of_the_last_process_though_nobody_has_read_them_yet(node: Node) -> None:
    os.write(node.ranks[0].begin(), b"of an earlier process\n")
    os.write(node.ranks[0].begin(), b"first\nsecond\nthird")
    assert node.ranks[0].last_lines(2) == ["second", "third"]
    assert node.ranks[0].last_lines() == ["first", "second", "third"]
    os.write(node.ranks[0].begin(), b"x" * 20_000 + b"\nlast\n")
    assert node.ranks[0].last_lines()[-1] == "last"
    assert sum(map(len, node.ranks[0].last_lines())) <= 16 * 1024
    node.start()
    node.end()
    assert node.log(0).startswith("of an earlier process\nfirst\n")


def test_a_disk_that_stops_costs_output_and_no_time(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank-1.log")  # nobody can open it until somebody reads
    node = Node(tmp_path, new_logs=())
    os.close(node.terminal)
    node.start()
    thread = pour(node.ranks[1], PLENTY)
    thread.join(60)
    assert not thread.is_alive(), "the rank waits for its disk"
    (told,) = [line for line in node.said if "left out" in line]
    assert "its disk does not answer in time; training goes on" in told
    assert node.ranks[1].last_lines(1) == ["x" * 99]
    with (tmp_path / "rank-1.log").open("rb") as back:
        missing = 0
        while not missing:
            line = back.readline()
            missing = int(line.split()[1]) if line.startswith(b"[checkpointless: ") else 0
        ended = threading.Thread(target=node.end, daemon=True)
        ended.start()
        back.read()
        ended.join(60)
    assert missing > PLENTY // 2


def test_a_terminal_that_takes_nothing_costs_lines_and_no_time(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_module, "_CLOSE_S", 60.0)  # else a busy machine tears the last line
    node.start()
    thread = pour(node.ranks[0], PLENTY)
    thread.join(60)
    assert not thread.is_alive(), "the rank waits for the terminal"
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append(node.read_terminal()), daemon=True)
    reader.start()  # it goes on
    node.end()
    reader.join(60)
    assert "bytes are left out here; they are in" in got[0]
    assert [line[:20] for line in got[0].splitlines() if not line.startswith("[rank 0] ")] == []


def test_a_reader_of_the_terminal_that_is_gone_is_named_once(node: Node) -> None:
    node.start()
    os.close(node.terminal)
    node.terminal = os.open(os.devnull, os.O_RDONLY)
    pour(node.ranks[0], 1_000_000).join(60)
    node.end()
    assert node.said == [f"the output of ranks is no longer shown: Broken pipe; it is in {node.folder}"]
    assert len(node.log(0)) == 1_000_000


def test_processes_cost_no_descriptor_and_the_end_leaves_none(tmp_path: Path) -> None:
    before, threads = descriptors(), set(threading.enumerate())
    node = Node(tmp_path)
    node.start()
    node.ranks[0].begin()
    wait_until(lambda: (tmp_path / "rank-1.log").exists())
    running, at_work = len(descriptors()), set(threading.enumerate())
    for _ in range(20):
        os.write(node.ranks[0].begin(), b"a process\n")
        assert node.ranks[0].last_lines() == ["a process"]
    assert len(descriptors()) == running
    assert set(threading.enumerate()) <= at_work  # those of earlier tests may end meanwhile
    node.end()
    os.close(node.terminal)
    assert descriptors() == before
    assert set(threading.enumerate()) <= threads


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
