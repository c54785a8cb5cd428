"""Provide agents whose ranks use devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkpointless.agent.ranks import device_guard
from checkpointless.devices.health import DeviceSurvey
from tests.unit.agent.ranks.guarded_node import Looks, Node, NoXids


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[DeviceSurvey], Node]]:
    monkeypatch.setattr(device_guard, "XidCollector", NoXids)
    made: list[Node] = []

    def make_node(found: DeviceSurvey, **more: float) -> Node:
        made.append(Node(tmp_path, Looks(found), **more))
        return made[-1]

    yield make_node
    for node in made:
        node.looks.go_on.set()
        node.agent.close()
        node.selector.close()
