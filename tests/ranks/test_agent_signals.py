"""Test that the signals that an agent gets reach its ranks, which save, leave the block and end by themselves."""

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from checkpointless.observability.telemetry.events import read_events
from tests.ranks.agent_job import Ended, Job
from tests.ranks.test_agent_nodes import Nodes
from tests.waiting import wait_until

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

HUNG_UP, QUIT, TERM, USR1 = signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1


def left(folder: Path, what: str) -> list[int]:
    return sorted(int(path.name.rpartition("-")[2]) for path in folder.glob(f"{what}-*"))


def wait_for_ranks(folder: Path, count: int) -> None:
    wait_until(lambda: left(folder, "began") == list(range(count)), 120)


def send(folder: Path, number: signal.Signals, *args: str, code: int = 1, **options: Any) -> Ended:
    """Send a signal to a job of two ranks that have begun, and wait for its end."""
    job = Job(folder, "signalled.py", *args, nproc=2, **options)
    wait_for_ranks(folder, 2)
    job.process.send_signal(number)
    return job.end(code=code)


@pytest.mark.parametrize("options", [{}, pytest.param({"preload": ("sets_up_cuda",)}, marks=pytest.mark.long)])
def test_a_signal_for_the_script_has_it_save_and_end_well(tmp_path: Path, options: dict[str, Any]) -> None:
    """This is what Slurm's ``--signal=USR1@90`` does before the time limit."""
    ended = send(tmp_path, USR1, "SIGUSR1", "0,1", "0", code=0, **options)
    assert ("has initialized CUDA" in ended.err) == bool(options)
    for what in ("saved", "after", "atexit"):
        assert left(tmp_path, what) == [0, 1], what


def test_a_signal_is_kept_from_a_rank_that_would_die_of_it(tmp_path: Path) -> None:
    job = Job(tmp_path, "signalled.py", "SIGUSR1", "0", "0", nproc=3)
    wait_for_ranks(tmp_path, 3)
    for _ in range(2):
        job.process.send_signal(USR1)
        wait_until(lambda: left(tmp_path, "saved") == [0])
    (tmp_path / "stop").touch()
    ended = job.end()
    line = "SIGUSR1 is not passed on to ranks 1-2: without a handler a process would die of it\n"
    assert ended.err == line
    assert left(tmp_path, "after") == [0, 1, 2]


@pytest.mark.parametrize("number", [TERM, HUNG_UP, QUIT])
def test_a_signal_that_ends_the_job_leaves_time_to_save(tmp_path: Path, number: signal.Signals) -> None:
    assert send(tmp_path, number, number.name, "0,1", "1").err == f"stopped by {number.name}\n"
    for what in ("saved", "after", "atexit"):
        assert left(tmp_path, what) == [0, 1], what


def test_ctrl_c_raises_keyboard_interrupt_in_the_ranks(tmp_path: Path) -> None:
    assert send(tmp_path, signal.SIGINT, "SIGUSR1", "", "0").err == "stopped by SIGINT\n"
    assert left(tmp_path, "interrupted") == left(tmp_path, "atexit") == [0, 1]
    assert left(tmp_path, "after") == []


def test_ranks_that_die_of_the_signal_are_no_incident(tmp_path: Path) -> None:
    assert send(tmp_path, TERM, "SIGUSR1", "", "0").err == "stopped by SIGTERM\n"
    assert not any(event.stage == "detect" for event in read_events(tmp_path))


def test_what_does_not_end_in_time_is_killed_and_named(tmp_path: Path) -> None:
    job = Job(tmp_path, "plain.py", "0:wait", "*:stubborn", term_grace_s=5.0)
    wait_until(lambda: all("waiting" in job.log(rank) for rank in range(3)))
    job.process.send_signal(TERM)
    ended = job.end(code=1)
    assert ended.err.splitlines() == [
        "ranks 1-2 did not end within 5 s of SIGTERM and were killed",
        "stopped by SIGTERM",
    ]


def test_agents_of_several_nodes_pass_on_what_they_get(tmp_path: Path) -> None:
    """The signal comes to the second node first: its ranks save, and those of the first node train on meanwhile."""
    nodes = Nodes(tmp_path, 2, "SIGTERM", "0,1,2,3", "gate", script="signalled.py")
    wait_for_ranks(tmp_path, 4)
    nodes.agents[1].process.send_signal(TERM)
    wait_until(lambda: left(tmp_path, "saving") == [2, 3])
    time.sleep(0.5)  # for the first node to hear that the second leaves, if it said so
    nodes.agents[0].process.send_signal(TERM)
    wait_until(lambda: left(tmp_path, "saving") == [0, 1, 2, 3])
    nodes.open_gate()
    ended = nodes.end(code=1)
    for what in ("saved", "after", "atexit"):
        assert left(tmp_path, what) == [0, 1, 2, 3], what
    assert "incident" not in "".join(each.err for each in ended)


def test_the_ranks_of_other_nodes_have_the_same_time_when_the_coordinators_agent_is_stopped(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2, "SIGTERM", "0,1,2,3", "1", script="signalled.py")
    wait_for_ranks(tmp_path, 4)
    nodes.agents[0].process.send_signal(TERM)
    ended = nodes.end(code=1)
    assert all(each.err.splitlines()[-1] == "stopped by SIGTERM" for each in ended)
    assert left(tmp_path, "after") == left(tmp_path, "atexit") == [0, 1, 2, 3]
