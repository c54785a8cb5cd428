"""Check that jobs on several nodes (agents on one machine) have the bits of a run on one node without faults."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpointless.observability.report.verify import Steps
from checkpointless.observability.telemetry.event_names import Rung
from tests.ranks.jobs import Job, Scene, run_job, small
from tests.ranks.layouts import DROPOUT
from tests.ranks.nemo_zygote import Zygote
from tests.ranks.network import Network, is_possible, network

pytestmark = [pytest.mark.ranks, pytest.mark.nemo, pytest.mark.timeout(400)]

STEPS = 6

Run = Callable[..., Job]


@pytest.fixture
def disturb_nodes(nemo_zygote: Zygote, undisturbed: Callable[..., Steps], tmp_path: Path) -> Run:
    def run(*faults: str, args: tuple[str, ...] = DROPOUT, **settings: Any) -> Job:
        args = (*small(4, STEPS), *args)
        reference = undisturbed(4, args)
        settings = {"node_timeout_s": 4.0, **settings}
        job = run_job(nemo_zygote, tmp_path / "run", 2, nnodes=2, args=args, faults=faults, **settings)
        job.assert_same(reference, STEPS)
        return job

    return run


@pytest.fixture
def hosts() -> Iterator[Network | None]:
    """Provide a network of four hosts, or None where the machine allows none, and ports must do."""
    if not is_possible():
        yield None
        return
    with network(4) as made:
        yield made


@pytest.mark.parametrize("phase", ["backward", pytest.param("optimizer", marks=pytest.mark.long)])
def test_a_whole_node_killed_with_a_spare(disturb_nodes: Run, phase: str) -> None:
    job = disturb_nodes(f"node@{phase}:rank=2,step=3", spares=1, lost=(1,))
    (incident,) = job.incidents
    assert incident.respawned == (2, 3)
    assert any("a spare takes the place of node 1" in line for line in job.said)
    assert incident.rung is Rung.NODE


@pytest.mark.long
def test_ranks_of_two_nodes_lost_one_after_the_other(disturb_nodes: Run) -> None:
    job = disturb_nodes("sigkill@forward:rank=0,step=4", "sigkill@recovery:rank=3,step=3")
    assert job.incidents[-1].target == 3


@pytest.mark.long
def test_a_node_lost_while_another_fault_is_handled(disturb_nodes: Run) -> None:
    job = disturb_nodes("exception@forward:rank=0,step=4", "node@recovery:rank=2,step=3", spares=1, lost=(1,))
    assert job.incidents[-1].target == 3
    assert job.incidents[-1].respawned == (2, 3)


def test_nodes_with_a_network_between_them(disturb_nodes: Run, hosts: Network | None) -> None:
    job = disturb_nodes(
        "sigkill@backward:rank=2,step=2",
        "node@optimizer:rank=1,step=4",
        network=hosts,
        spares=1,
        lost=(0,),
        outside=True,
    )
    assert [incident.respawned for incident in job.incidents] == [(2,), (0, 1)]


@pytest.mark.long  # test_agent_nodes.py has one
def test_a_coordinator_killed_and_started_again_while_the_ranks_train(
    disturb_nodes: Run, hosts: Network | None
) -> None:
    def kill_it(scene: Scene) -> None:
        assert scene.coordinator is not None
        scene.wait_for_step(1)
        scene.coordinator.kill()
        scene.coordinator.start()

    job = disturb_nodes(
        "slow@forward:rank=1,step=4,seconds=8",
        "sigkill@optimizer:rank=2,step=5",
        network=hosts,
        outside=True,
        meanwhile=kill_it,
    )
    assert [incident.respawned for incident in job.incidents] == [(2,)]
    assert any("is back" in line for line in job.said)


@pytest.mark.long
def test_a_node_cut_off_for_longer_than_the_limit_and_coming_back(
    disturb_nodes: Run, hosts: Network | None
) -> None:
    def cut_off(scene: Scene) -> None:
        scene.wait_for_step(2)
        pulled = _pull(scene, 1)
        scene.wait_for(lambda: scene.stages("detect"))
        pulled()

    job = disturb_nodes("slow@forward:rank=2,step=4,seconds=3", network=hosts, outside=True, meanwhile=cut_off)
    (incident,) = job.incidents
    assert incident.respawned == ()
    assert "no word from it for 4 s" in incident.cause


@pytest.mark.parametrize(
    "faults",
    [
        ("store@backward:rank=2,step=3",),
        pytest.param(  # a network between nodes is cut above
            ("partition@forward:rank=3,step=3,seconds=8", "slow@between:rank=0,step=3,seconds=6"),
            marks=pytest.mark.long,
        ),
    ],
    ids=["store", "partition"],
)
def test_a_node_that_loses_its_coordinator_on_purpose(disturb_nodes: Run, faults: tuple[str, ...]) -> None:
    job = disturb_nodes(*faults)
    (incident,) = job.incidents
    assert (incident.respawned, incident.rung) == ((), Rung.NODE)


def _pull(scene: Scene, node: int) -> Callable[[], None]:
    """Cut a node off; where there is no network, stop its agent.

    Returns:
        Undoes it.
    """
    if scene.network is not None:
        net = scene.network
        net.cut_off(node)
        return lambda: net.reconnect(node)
    (began,) = [event for event in scene.stages("job") if event.node == node and event.edge == "begin"]
    os.kill(began.pid, signal.SIGSTOP)
    return lambda: os.kill(began.pid, signal.SIGCONT)
