"""Provide what tests do with a client and the stand-in's agent in turns."""

import os
import time
from collections.abc import Callable

from checkpointless.launcher.client.hyperpod import HyperPodClient
from tests import hyperpod_stand_in as stand_in

MakeAgent = Callable[..., stand_in.Agent]


def enter(client: HyperPodClient, agent: stand_in.Agent) -> None:
    """Bring ``client`` into the generation that ``agent`` starts next."""
    client.hello(int(os.environ["JOB_RESTART_COUNT"]))
    agent.wait_for("at_rcb_barrier", 1)
    time.sleep(0.05)
    agent.start()
    assert client.wait_go(agent.restart_count - 1, 60).generation == agent.restart_count


def begin(client: HyperPodClient, agent: stand_in.Agent, ranks: int = 2) -> None:
    """Bring ``client`` to where it meets the others of so many ranks, who have not come."""
    agent.envs = {"WORLD_SIZE": str(ranks), **agent.envs}
    client.hello(0)
    agent.wait_for("at_rcb_barrier")
    time.sleep(0.05)
    agent.start()


def until(condition: Callable[[], object], timeout_s: float = 60) -> None:
    by_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < by_s
        time.sleep(0.01)
