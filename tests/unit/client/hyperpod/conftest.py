"""Install the stand-in for the vendor's package, and end its agents with the test."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpointless.launcher.client import factory
from checkpointless.launcher.client.hyperpod import HyperPodClient
from checkpointless.launcher.client.hyperpod import client as hyperpod_client
from tests import hyperpod_stand_in as stand_in
from tests.unit.client.hyperpod.turns import MakeAgent


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Install the stand-in; the environment, the factory's client and all clients end with the test."""
    made: list[HyperPodClient] = []
    original = HyperPodClient.__init__

    def remember(client: HyperPodClient, *args: Any, **settings: Any) -> None:
        original(client, *args, **settings)
        made.append(client)

    before = dict(os.environ)
    with monkeypatch.context() as patch:
        patch.setattr(HyperPodClient, "__init__", remember)
        patch.setattr(factory, "_of_other_launcher", None)
        patch.setattr(hyperpod_client, "LISTEN_S", 1.0)
        for name, module in stand_in.modules().items():
            patch.setitem(sys.modules, name, module)
        yield patch
        for client in made:
            client.close()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def make_agent(environment: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[MakeAgent]:
    agents: list[stand_in.Agent] = []

    def make(**settings: Any) -> stand_in.Agent:
        agent = stand_in.Agent(tmp_path / f"agent{len(agents)}", 1, **settings)
        agents.append(agent)
        os.environ.update(agent.environment(0))
        return agent

    yield make
    for agent in agents:
        agent.close()
