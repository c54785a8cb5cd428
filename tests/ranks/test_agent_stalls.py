"""Test stalls, pauses, and hangs in the first generation: no healthy process is replaced."""

import contextlib
import signal
import time
from pathlib import Path

import pytest

from tests.ranks.agent_job import Job
from tests.ranks.test_agent_nodes import Nodes, replaced
from tests.waiting import wait_until

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]


def processes(nodes: Nodes | Job) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for note in nodes.notes("go"):
        found.setdefault(note["rank"], set()).add(note["pid"])
    return found


def one_each(ranks: int) -> dict[int, int]:
    return dict.fromkeys(range(ranks), 1)


def counts(nodes: Nodes | Job) -> dict[int, int]:
    return {rank: len(pids) for rank, pids in processes(nodes).items()}


@pytest.mark.parametrize(
    ("floor_s", "seconds"),
    [(2.0, 6), pytest.param(None, 40, marks=pytest.mark.long)],
    ids=["short", "default-limits"],
)
def test_a_stall_that_ranks_share_is_waited_for(tmp_path: Path, floor_s: float | None, seconds: int) -> None:
    """All ranks stall, then half of them, then those of one node."""
    stalls = (f"0,1,2,3@8:{seconds}", f"0,2@14:{seconds}", f"2,3@20:{seconds}")
    nodes = Nodes(tmp_path, 2, "26", *stalls, script="stalls.py", floor_s=floor_s)
    first, _ = [agent.end(60 + 4 * seconds) for agent in nodes.agents]
    assert counts(nodes) == one_each(4)
    assert {note["generation"] for note in nodes.notes("go")} == {0}
    assert len(nodes.notes("stall")) == 8
    assert "; recovering" not in first.err
    assert "nobody is replaced for it" in first.err, first.err
    assert nodes.agents[0].events("stall") != []


def test_a_rank_that_stalls_alone_and_does_not_come_back_is_replaced(tmp_path: Path) -> None:
    job = Job(tmp_path, "stalls.py", "8", "1@5:600", nproc=3, heartbeat_timeout_s=4.0)
    job.end()
    assert counts(job) == {0: 1, 1: 2, 2: 1}


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("import", "rank 1 did not enter the block within 4 s after the first rank did"),
        pytest.param("set-up", "rank 1 made no progress for 4 s", marks=pytest.mark.long),
        pytest.param("start", "rank 1 made no progress for 4 s", marks=pytest.mark.long),
        pytest.param("1", "rank 1 made no progress for 4 s at step 1", marks=pytest.mark.long),
    ],
)
def test_a_hang_in_the_first_generation_is_found(tmp_path: Path, where: str, said: str) -> None:
    job = Job(tmp_path, "stalls.py", "4", f"1@{where}:600", nproc=3, heartbeat_timeout_s=4.0)
    ended = job.end()
    assert f"incident 1: {said}" in ended.err
    assert {rank: pids for rank, pids in counts(job).items() if rank != 1} == {0: 1, 2: 1}
    assert [note["rank"] for note in job.notes("step") if note["step"] == 4] != []


def test_a_job_that_shows_no_progress_is_left_alone(tmp_path: Path) -> None:
    job = Job(tmp_path, "stalls.py", "silent:0.5", nproc=3, heartbeat_timeout_s=0.5)
    ended = job.end()
    assert counts(job) == one_each(3)
    assert "; recovering" not in ended.err


@pytest.mark.parametrize(("pause_s"), [4.5, pytest.param(7.0, marks=pytest.mark.long)])
def test_a_coordinator_that_is_paused_loses_nobody(tmp_path: Path, pause_s: float) -> None:
    nodes = Nodes(tmp_path, 2, "2:30:0:gate", outside=True, extra_env={"STEPS": "40"})
    coordinator = nodes.coordinator.process
    wait_until(lambda: nodes.committed(0, 5))
    coordinator.send_signal(signal.SIGSTOP)
    time.sleep(pause_s)
    coordinator.send_signal(signal.SIGCONT)
    time.sleep(2.0)
    nodes.open_gate()
    nodes.end()
    said = nodes.coordinator.end()
    assert counts(nodes) == one_each(4)
    assert "; recovering" not in said
    assert {note["generation"] for note in nodes.notes("go")} == {0}


def test_an_agent_that_is_paused_is_taken_back_with_its_processes(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2, "2:30:0:gate", "2:30:1:gate", extra_env={"STEPS": "40"})
    wait_until(lambda: nodes.committed(2, 29))
    stopped = nodes.agents[1].process
    stopped.send_signal(signal.SIGSTOP)
    with contextlib.ExitStack() as stack:
        stack.callback(stopped.send_signal, signal.SIGCONT)
        wait_until(lambda: nodes.notes("notice", 0))
    nodes.open_gate()
    first, _ = nodes.end()
    assert counts(nodes) == one_each(4)
    assert replaced(nodes) == {}
    assert "node 1 is back with its ranks" in first.err
