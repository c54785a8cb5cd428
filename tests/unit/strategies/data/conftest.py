"""Let each test begin without the sources and samplers of earlier ones."""

import sys

import pytest

from checkpointless.state import rng


@pytest.fixture(autouse=True)
def no_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rng, "_sources", {})
    samplers = sys.modules.get("checkpointless.integrations.lightning.data.loaders")
    if samplers is not None:
        monkeypatch.setattr(samplers, "_kept", [])
