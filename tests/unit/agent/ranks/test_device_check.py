"""Test the device check with real processes, under an agent whose ranks are not real."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from checkpointless.launcher.protocol.messages import DeviceBad, Kill, NodeMessage, RankEnded, RankState, Spawn
from checkpointless.system.process_tree import ProcessLook
from tests.unit.agent.commanded_node import CommandedNode
from tests.waiting import wait_until


class CheckedNode(CommandedNode):
    """Represents the agent of rank 0, whose first process runs, with a shell script as its device check."""

    def __init__(self, folder: Path, script: str, timeout_s: float = 60.0) -> None:
        self.later_s = 0.0
        self.check = folder / "check.sh"
        self.check.write_text(f"#!/bin/sh\ncd '{folder}'\n{script}\n")
        self.check.chmod(0o755)
        check: dict[str, Any] = {"device_check": f"'{self.check}'", "device_check_timeout_s": timeout_s}
        super().__init__(folder, clock=lambda: time.monotonic() + self.later_s, **check)
        self.until(lambda: self.agent.processes.can_start)
        self.spawn(0)
        self.until(lambda: self.is_started)

    @property
    def is_started(self) -> bool:
        return self.agent.ranks[0].pid is not None

    @property
    def reports(self) -> list[NodeMessage]:
        return [message for message in self.said if isinstance(message, DeviceBad)]

    def spawn(self, incarnation: int, anyway: bool = False) -> None:
        env = {"RANK": "0", "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "5"}
        self.agent.obey(Spawn(0, incarnation, 0, "1", env, anyway))

    def replace(self, incarnation: int = 1) -> None:
        self.ends(0)
        self.spawn(incarnation)

    def until(self, holds: Callable[[], bool]) -> None:
        wait_until(holds, meanwhile=self.tick)


Make = Callable[..., CheckedNode]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[CheckedNode] = []
    before = set(psutil.Process().children())

    def make_node(script: str, **more: float) -> CheckedNode:
        made.append(CheckedNode(tmp_path, script, **more))
        return made[-1]

    yield make_node
    for node in made:
        node.close()
    assert set(psutil.Process().children()) <= before, "every check is reaped"


def pids(path: Path, count: int) -> list[int]:
    wait_until(lambda: path.exists() and len(path.read_text().split()) >= count)
    return [int(word) for word in path.read_text().split()]


def are_dead(found: list[int]) -> bool:
    """Whether processes have ended; a child of a check is reaped by whoever adopts it."""
    return all(ProcessLook.at(pid).letter in (0, *b"ZX") for pid in found)


def test_only_processes_after_the_first_are_checked_in_their_ranks_environment(make: Make, tmp_path: Path) -> None:
    node = make('echo "$RANK $LOCAL_RANK $CUDA_VISIBLE_DEVICES" >> seen')
    assert not (tmp_path / "seen").exists()
    node.replace()
    assert (node.is_started, node.agent.ranks[0].state) == (False, RankState.STARTING)
    node.until(lambda: node.is_started)
    assert ((tmp_path / "seen").read_text(), node.reports, node.printed) == ("0 0 5\n", [], [])


@pytest.mark.parametrize(
    ("script", "how"),
    [
        ("exit 1", "exited with 1"),
        ("echo fine; echo 'row 3 is bad' >&2; echo; exit 7", "exited with 7: row 3 is bad"),
        ("kill -SEGV $$", "was killed by SIGSEGV"),
        ("yes much | head -c 1000000; printf 'the last'; exit 2", "exited with 2: the last"),
        ("printf '\\377\\033[31mred\\n'; exit 3", "exited with 3: �\\x1b[31mred"),
    ],
)
def test_a_rank_is_not_started_if_the_check_fails_unless_it_is_said_so(make: Make, script: str, how: str) -> None:
    node = make(script)
    node.replace()
    node.until(lambda: bool(node.reports))
    assert node.reports == [DeviceBad(0, 1, f"the device check {how}")]
    assert node.printed == [f"rank 0: the device check {how}"]
    for _ in range(5):
        node.tick()
    assert (node.is_started, len(node.reports)) == (False, 1)
    node.spawn(1, anyway=True)
    node.until(lambda: node.is_started)


def test_at_its_limit_a_check_is_killed_with_its_children_and_the_loop_goes_on(make: Make, tmp_path: Path) -> None:
    script = "sleep 900 & echo $! > pids; setsid sleep 900 & echo $! >> pids; echo waits; echo $$ >> pids; wait"
    node = make(script, timeout_s=100.0)
    node.replace()
    found = pids(tmp_path / "pids", 3)
    for _ in range(20):
        node.tick()  # none of them waits for the check
    assert not node.is_started
    node.later_s += 100.0
    node.until(lambda: bool(node.reports))
    assert node.printed == ["rank 0: the device check was not over within 100 s: waits"]
    node.until(lambda: are_dead(found))


def test_a_rank_that_is_killed_during_its_check_has_ended_with_it(make: Make, tmp_path: Path) -> None:
    node = make("echo $$ > pids; exec sleep 100")
    node.replace()
    found = pids(tmp_path / "pids", 1)
    node.agent.obey(Kill(0, 1, -1))
    assert isinstance(node.said[-1], RankEnded)
    assert (node.said[-1].forgiven, node.said[-1].was_started) == (True, False)
    assert node.agent.ranks[0].state is RankState.GONE
    node.until(lambda: are_dead(found))
    node.spawn(1, anyway=True)  # an answer that comes too late
    assert not node.is_started


def test_a_check_that_cannot_be_run_any_more_says_nothing_of_the_device(make: Make) -> None:
    node = make("exit 1")
    node.check.unlink()
    node.replace()
    node.until(lambda: node.is_started)
    (said,) = node.printed
    assert said.startswith("rank 0 is started without a device check, which cannot be run: ")
    assert str(node.check) in said
