"""Test that what ranks print is kept and shown, and that no rank waits for a disk or a terminal that does not."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpointless.launcher.agent.ranks import output as output_module
from checkpointless.launcher.agent.ranks.output import Output, Printed
from tests.descriptors import descriptors
from tests.waiting import wait_until

PLENTY = 20_000_000


class Node:
    """Provides the output of a node with two ranks."""

    def __init__(self, folder: Path, new_logs: tuple[int, ...] = (0, 1)) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.terminal, self.shown = os.pipe()
        self.output = Output(
            folder, None, 1 << 30, new_logs=new_logs, terminal=self.shown, shown=(0, 1), say=self.said.append
        )
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
    assert node.log(1) == "before anyone reads\nlast"
    assert (node.folder / "zygote.log").read_text() == "imported\n"
    shown = node.read_terminal().splitlines()
    assert [line for line in shown if line.startswith("[rank 1] ")] == [
        "[rank 1] before anyone reads",
        "[rank 1] last",
    ]
    assert len(shown) == 1002
    assert node.said == []


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


def test_a_terminal_that_takes_nothing_costs_lines_on_it_and_no_time(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
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
