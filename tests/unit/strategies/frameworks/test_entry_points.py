"""Test that installed packages are asked once for the callbacks that they offer to every trainer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
from lightning.fabric.utilities import registry
from lightning.pytorch import Callback, Trainer

from checkpointless.integrations.lightning.frameworks import entry_points

pytestmark = pytest.mark.nemo
GROUP = "lightning.pytorch.callbacks_factory"


class Offered(Callback):
    """A callback of an installed package."""


def offer() -> list[Callback]:
    """Make the package's callbacks."""
    return [Offered()]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Install it over packages that count how often they are asked."""
    groups: list[str] = []

    def look_up(*, group: str) -> EntryPoints:
        groups.append(group)
        return EntryPoints([EntryPoint("mine", f"{__name__}:offer", group)])

    monkeypatch.setattr(registry, "entry_points", look_up)
    entry_points.install()
    yield groups
    entry_points.uninstall()
    assert registry.entry_points is look_up


def test_each_trainer_gets_callbacks_of_its_own_from_one_look_up(asked: list[str]) -> None:
    entry_points.install()
    made = [
        [each for each in Trainer(accelerator="cpu", logger=False).callbacks if isinstance(each, Offered)]  # type: ignore[attr-defined]
        for _ in range(3)
    ]
    assert [len(each) for each in made] == [1, 1, 1]
    assert len({id(each[0]) for each in made}) == 3
    assert asked == [GROUP]


def test_another_search_path_is_another_question(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    registry._load_external_callbacks(GROUP)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    registry._load_external_callbacks(GROUP)
    registry._load_external_callbacks(GROUP)
    registry._load_external_callbacks("other")
    assert asked == [GROUP, GROUP, "other"]
