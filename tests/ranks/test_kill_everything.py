"""``kill -9`` of everything that belongs to a job, in any order, leaves nothing behind."""

import random
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path

import psutil
import pytest

from checkpointless.system.temp_folder import private_folder
from tests.ranks.agent_job import is_alive
from tests.ranks.jobs import Scene, run_nodes
from tests.ranks.nemo_zygote import Zygote
from tests.ranks.test_agent_nodes import Nodes
from tests.ranks.test_worker_streams import NOISY
from tests.waiting import wait_until

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

SHARED_MEMORY = Path("/dev/shm")
GONE_WITHIN_S = 60.0


def kill_all(processes: list[psutil.Process], seed: int) -> None:
    """Kill them one after the other, in an order and at a pace that ``seed`` tells."""
    order = random.Random(seed)
    order.shuffle(processes)
    for process in processes:
        if process.is_running():
            process.send_signal(signal.SIGKILL)
        time.sleep(order.choice((0.0, 0.005, 0.05, 0.2)))


def files(*folders: Path) -> set[Path]:
    return {path for folder in folders for path in folder.rglob("*")}


def is_closed(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def listening(processes: list[psutil.Process]) -> set[int]:
    return {
        connection.laddr.port
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


def is_another_agents(path: Path) -> bool:
    """Return whether a path lies in the folder of a living agent, of another test: the others have been removed."""
    return SHARED_MEMORY in path.parents and path.relative_to(SHARED_MEMORY).parts[0].startswith("ckpl-")


@pytest.fixture
def leaves_nothing(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[list[psutil.Process], int], None]:
    """Return a function that kills processes, and waits until their ports and files are gone, too.

    If all are killed at once, the folders of the ranks' sockets and of hand-overs stay; the next agent on the node
    removes them.
    """
    forkserver.ensure_running()  # before the next line: what it imports writes to the folder, too
    monkeypatch.setenv("TMPDIR", str(short_folder))
    before = files(SHARED_MEMORY, short_folder)

    def kill(processes: list[psutil.Process], seed: int) -> None:
        ports = listening(processes)
        assert ports
        kill_all(processes, seed)
        wait_until(lambda: not any(is_alive(process.pid) for process in processes), GONE_WITHIN_S)
        wait_until(lambda: all(map(is_closed, ports)), GONE_WITHIN_S)

        def nothing_is_left() -> bool:
            with monkeypatch.context() as here:
                here.setattr(tempfile, "tempdir", str(short_folder))
                with private_folder(), private_folder(lambda: SHARED_MEMORY, "none"):
                    pass
            left = files(SHARED_MEMORY, short_folder) - before
            return not [each for each in left if not is_another_agents(each)]

        wait_until(nothing_is_left, GONE_WITHIN_S)  # other tests' shared memory comes and goes

    return kill


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_two_nodes_a_spare_and_a_coordinator(
    tmp_path: Path, leaves_nothing: Callable[[list[psutil.Process], int], None], seed: int
) -> None:
    nodes = Nodes(tmp_path / "run", 2, "2:5:0:sleep", spares=1, outside=True)
    wait_until(lambda: nodes.notes("fault", 2))
    processes = [psutil.Process(nodes.coordinator.process.pid)]
    for agent in nodes.agents:
        processes += agent.left()
    assert len(processes) >= 1 + 3 * 2 + 4  # the coordinator, three agents with a zygote each, four ranks
    leaves_nothing(processes, seed)
    for agent in nodes.agents:
        agent.process.communicate()
        wait_until(lambda agent=agent: agent.left() == [], GONE_WITHIN_S)  # type: ignore[misc]
    nodes.coordinator.end(code=None)


@pytest.mark.long  # the test above kills the same processes but workers
@pytest.mark.nemo
@pytest.mark.parametrize("seed", range(1))
def test_ranks_of_real_training_with_workers_of_their_data_loaders(
    nemo_zygote: Zygote,
    tmp_path: Path,
    leaves_nothing: Callable[[list[psutil.Process], int], None],
    short_folder: Path,
    seed: int,
) -> None:
    def kill(scene: Scene) -> None:
        scene.wait_for_step(2)
        agents = [event.pid for event in scene.stages("job") if event.edge == "begin"]
        assert len(agents) == 2
        processes = [psutil.Process(pid) for pid in agents]
        processes += [child for agent in list(processes) for child in agent.children(recursive=True)]
        assert len(processes) >= 2 + 2 + 4 + 4 * 2  # agents, zygotes, ranks, two workers of each
        assert list(short_folder.glob("ckpl-*/*/pymp-*/listener-*"))
        leaves_nothing(processes, seed)

    jobs = run_nodes(
        nemo_zygote,
        tmp_path / "run",
        2,
        2,
        args=("trainer.max_steps=4", *NOISY),
        faults=("slow@forward:rank=1,step=3,seconds=60",),
        lost=(0, 1),
        meanwhile=kill,
        tmp=short_folder,
    )
    assert all(job is None or job.code == 1 for job in jobs)  # it was killed, or ended since its zygote was
