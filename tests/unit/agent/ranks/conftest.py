"""Provide agents whose ranks use devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkpointless.agent.ranks import device_guard
from checkpointless.devices.health import DeviceSurvey
from tests.unit.agent.ranks.guarded_node import GuardedNode, Looks, NoXids


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[DeviceSurvey], GuardedNode]]:
    monkeypatch.setattr(device_guard, "XidCollector", NoXids)
    made: list[GuardedNode] = []

    def make_node(found: DeviceSurvey, **more: float) -> GuardedNode:
        made.append(GuardedNode(tmp_path, Looks(found), **more))
        return made[-1]

    yield make_node
    for node in made:
        node.looks.go_on.set()
        node.agent.close()
        node.selector.close()
