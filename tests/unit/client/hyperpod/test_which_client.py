"""Test which client a process gets where the vendor's package is installed."""

import logging
import os

import pytest

from checkpointless.launcher.client import factory
from checkpointless.launcher.client.agent_client import StandaloneClient
from checkpointless.launcher.client.factory import HPAgentK8sAPIFactory, wait_rank
from checkpointless.launcher.client.hyperpod import HyperPodClient
from checkpointless.system.environment import HYPERPOD_SOCKET_ENV
from tests import hyperpod_stand_in as stand_in
from tests.unit.client.hyperpod.turns import MakeAgent


def test_the_factory_takes_the_adapter_under_the_vendors_agent(make_agent: MakeAgent) -> None:
    make_agent()
    client = HPAgentK8sAPIFactory()()
    assert isinstance(client, HyperPodClient)
    assert HPAgentK8sAPIFactory()() is client


def test_elsewhere_the_installed_package_changes_nothing(environment: pytest.MonkeyPatch) -> None:
    environment.delenv(stand_in.SOCKET_ENV, raising=False)
    environment.setenv("WORLD_SIZE", "1")
    assert isinstance(HPAgentK8sAPIFactory()(), StandaloneClient)


def test_under_our_own_agent_the_vendors_is_not_asked(
    make_agent: MakeAgent, environment: pytest.MonkeyPatch
) -> None:
    agent = make_agent()
    ours = StandaloneClient()
    environment.setattr(factory.AgentClient, "from_environment", lambda: ours)
    os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    wait_rank()
    assert HPAgentK8sAPIFactory()() is ours
    assert agent.heard == []


def test_the_variable_is_the_one_that_the_package_reads() -> None:
    assert HYPERPOD_SOCKET_ENV == stand_in.SOCKET_ENV


def test_nothing_is_said_about_a_launcher_that_does_not_respawn(
    make_agent: MakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    make_agent()
    os.environ["RANK"] = "0"
    with caplog.at_level(logging.WARNING):
        HPAgentK8sAPIFactory()()
    assert "does not respawn" not in caplog.text
