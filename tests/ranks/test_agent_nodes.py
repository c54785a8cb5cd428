"""Test agents on one machine as the nodes of one job, each with processes of its own."""

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from tests.ranks.agent_job import TOKEN, Coordinator, Ended, Job
from tests.waiting import wait_until

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

NPROC = 2


class Nodes:
    """Runs a job of several nodes that train, with ``faults`` as the script's arguments.

    Node 0 is the first, and the spares are the last; ``outside`` the coordinator has a process of its own.
    """

    def __init__(
        self,
        run_dir: Path,
        nnodes: int,
        *faults: str,
        spares: int = 0,
        outside: bool = False,
        script: str = "steps.py",
        **options: Any,
    ) -> None:
        self.script = script
        self.run_dir, self.nnodes, self.faults = run_dir, nnodes, faults
        self.port = free_port()
        self.options = {"spares": spares, "node_timeout_s": 3.0, "regroup_timeout_s": 20.0, **options}
        if outside:
            self.coordinator = self.coordinate("--run-dir", str(run_dir), "--regroup-timeout", "20")
        self.agents = [self.start(node) for node in range(nnodes + spares)]

    def coordinate(self, *options: str) -> Coordinator:
        return Coordinator(f"127.0.0.1:{self.port}", self.nnodes, NPROC, "--node-timeout", "3", *options)

    def start(self, node: int, **options: Any) -> Job:
        where = {"nnodes": self.nnodes, "node_rank": node, "rdzv_endpoint": f"127.0.0.1:{self.port}"}
        settings = {**self.options, **where, "token": TOKEN, **options}
        return Job(self.run_dir, self.script, *self.faults, nproc=NPROC, **settings)

    def open_gate(self) -> None:
        (self.run_dir / "gate").touch()

    def end(self, *, code: int = 0) -> list[Ended]:
        return [agent.end(code=code) for agent in self.agents]

    def notes(self, kind: str, rank: int | None = None) -> list[dict[str, Any]]:
        return self.agents[0].notes(kind, rank)

    def committed(self, rank: int, step: int) -> bool:
        return any(note["step"] == step for note in self.notes("step", rank))

    def kill(self, node: int) -> None:
        """Kill an agent with SIGKILL; its ranks die with it."""
        self.agents[node].process.send_signal(signal.SIGKILL)
        self.agents[node].process.communicate()

    def kill_in_step_5(self, rank: int) -> None:
        """Kill the agent of a rank that sleeps in its step 5."""
        wait_until(lambda: self.notes("fault", rank))
        self.kill(rank // NPROC)


def replaced(nodes: Nodes, generation: int = 1) -> dict[int, int]:
    """Return the incarnation of each rank in a generation, of those that are not in their first process."""
    goes = {note["rank"]: note["incarnation"] for note in nodes.notes("go") if note["generation"] == generation}
    assert sorted(goes) == list(range(nodes.nnodes * NPROC))
    return {rank: incarnation for rank, incarnation in goes.items() if incarnation}


def test_ranks_of_three_nodes_meet_and_end(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 3)
    nodes.end()
    assert replaced(nodes, 0) == {}


@pytest.mark.parametrize("rank", [*(pytest.param(rank, marks=pytest.mark.long) for rank in (0, 3)), 5])
def test_a_rank_killed_on_any_node_is_respawned_alone(tmp_path: Path, rank: int) -> None:
    nodes = Nodes(tmp_path, 3, f"{rank}:4:0:SIGKILL")
    first, *_ = nodes.end()
    assert f"incident 1: rank {rank} killed by SIGKILL at step 4; recovering" in first.err
    assert "incident 1: recovered in" in first.err
    assert replaced(nodes) == {rank: 1}
    heard = nodes.notes("notice")
    assert {note["rank"] for note in heard} == set(range(6)) - {rank}


def test_ranks_of_two_nodes_fail_at_once(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 3, "2:4:0:SIGKILL", "5:4:0:SIGKILL")
    nodes.end()
    last = max(note["generation"] for note in nodes.notes("go"))
    assert replaced(nodes, last) == {2: 1, 5: 1}


def test_a_hanging_rank_of_another_node_is_found_and_replaced(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2, "3:4:0:SIGSTOP", heartbeat_timeout_s=2.0)
    first, _ = nodes.end()
    assert "rank 3 made no progress for 2 s at step 4" in first.err


def test_a_spare_takes_the_place_of_a_lost_node(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2, "2:5:0:sleep", spares=1)
    nodes.kill_in_step_5(2)
    first, _ = nodes.agents[0].end(), nodes.agents[2].end()
    assert "node 1 was lost" in first.err
    assert "a spare takes the place of node 1" in first.err
    assert replaced(nodes) == {2: 1, 3: 1}
    wait_until(lambda: nodes.agents[1].left() == [])


def test_a_lost_node_may_come_back_later(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2, "2:5:0:sleep")
    nodes.kill_in_step_5(2)
    time.sleep(2.0)
    again = nodes.start(1)
    first, _ = nodes.agents[0].end(), again.end()
    assert "waiting up to 20 s for another node 1" in first.err
    assert "incarnation 0 begins" in (tmp_path / "logs" / "rank-2.1.log").read_text()
    assert "incarnation 1 begins" in nodes.agents[0].log(2)
    assert replaced(nodes) == {2: 1, 3: 1}


def test_without_another_node_the_job_ends_with_the_reason(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2, "2:5:0:sleep", regroup_timeout_s=2.0)
    nodes.kill_in_step_5(2)
    first = nodes.agents[0].end(code=1)
    assert "and no other took its place within 2 s" in first.err


def test_a_stopped_agent_is_lost_by_its_silence_and_never_comes_back(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2, "2:5:0:sleep", spares=1, regroup_timeout_s=8.0)
    wait_until(lambda: nodes.notes("fault", 2))
    nodes.agents[1].process.send_signal(signal.SIGSTOP)
    try:
        first, _ = nodes.agents[0].end(), nodes.agents[2].end()
    finally:
        nodes.agents[1].process.send_signal(signal.SIGCONT)
    assert "node 1 was lost: no word from it for 3 s" in first.err.replace("at step 5", "").replace("  ", " ")
    partitioned = nodes.agents[1].end(code=1)
    assert "was lost" in partitioned.err


def test_node_0_gone_ends_the_others_within_a_bound(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2, "2:5:0:sleep", regroup_timeout_s=2.0)
    wait_until(lambda: nodes.notes("fault", 2))
    nodes.kill(0)
    second = nodes.agents[1].end(code=1)
    assert "the coordinator at 127.0.0.1" in second.err


def test_an_agent_without_the_token_is_told_so_and_nobody_else_notices(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2, "2:5:0:sleep", regroup_timeout_s=2.0)
    wait_until(lambda: nodes.notes("fault", 2))
    stranger = nodes.start(1, token="not the secret of this job")
    ended = stranger.end(code=1)
    assert "does not accept this job's token" in ended.err
    twin = nodes.start(1)
    ended = twin.end(code=1)
    assert "node 1 is here already" in ended.err
    nodes.kill(0)
    nodes.agents[1].end(code=1)


@pytest.mark.parametrize("lost", [0, 1])
def test_with_a_coordinator_of_its_own_any_node_may_be_lost(tmp_path: Path, lost: int) -> None:
    nodes = Nodes(tmp_path, 2, f"{2 * lost}:5:0:sleep", spares=1, outside=True)
    nodes.kill_in_step_5(2 * lost)
    for node in (1 - lost, 2):
        nodes.agents[node].end()
    said = nodes.coordinator.end()
    assert f"a spare takes the place of node {lost}" in said
    assert replaced(nodes) == {2 * lost: 1, 2 * lost + 1: 1}


@pytest.mark.parametrize(
    ("number", "said"),
    [(signal.SIGTERM, ["stopped by SIGTERM"]), (signal.SIGKILL, ["was lost", "was not reached within 2 s"])],
)
def test_a_coordinator_that_is_gone_for_good_ends_the_job(tmp_path: Path, number: int, said: list[str]) -> None:
    nodes = Nodes(tmp_path, 2, "2:5:0:sleep", outside=True, regroup_timeout_s=2.0)
    wait_until(lambda: nodes.notes("fault", 2))
    nodes.coordinator.process.send_signal(number)
    ended = nodes.end(code=1)
    assert all(words in each.err for each in ended for words in said)
    nodes.coordinator.end(code=None)


@pytest.mark.parametrize("while_there_is_none", [False, True])
def test_training_goes_on_without_a_coordinator_and_the_next_one_handles_a_fault(
    tmp_path: Path, while_there_is_none: bool
) -> None:
    nodes = Nodes(tmp_path, 2, "3:30:0:gate", "3:40:0:SIGKILL", outside=True, extra_env={"STEPS": "50"})
    wait_until(lambda: nodes.committed(0, 5))
    nodes.coordinator.kill()
    if while_there_is_none:
        nodes.open_gate()
        wait_until(lambda: nodes.notes("fault", 3))
        time.sleep(0.5)
        nodes.coordinator.start()
    else:
        wait_until(lambda: nodes.committed(0, 20))
        nodes.coordinator.start()
        said = nodes.coordinator.next_line()
        assert "took the job over in generation 0: its ranks train undisturbed" in said
        nodes.open_gate()
    nodes.end()
    said = nodes.coordinator.end()
    assert "incident 1: rank 3 killed by SIGKILL at step 40; recovering" in said
    assert replaced(nodes) == {3: 1}
    assert {note["generation"] for note in nodes.notes("go")} == {0, 1}


def test_a_coordinator_lost_during_an_incident_is_replaced_by_one_that_finishes_it(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2, "2:5:0:sleep", outside=True)
    nodes.kill_in_step_5(2)
    wait_until(lambda: nodes.notes("notice", 0))
    nodes.coordinator.kill()
    nodes.coordinator.start()
    again = nodes.start(1)
    nodes.agents[0].end()
    again.end()
    said = nodes.coordinator.end()
    assert "its ranks have to regroup" in said
    assert replaced(nodes) == {2: 1, 3: 1}


def test_node_0_and_its_coordinator_may_come_back(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2, "0:5:0:sleep")
    nodes.kill_in_step_5(0)
    again = nodes.start(0)
    first, _ = again.end(), nodes.agents[1].end()
    assert "incident 1: node 0 was lost" in first.err
    assert "as was the coordinator" in first.err
    assert replaced(nodes) == {0: 1, 1: 1}
