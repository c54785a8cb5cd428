"""Let each test begin without the sources and samplers of earlier ones."""

import pytest

from checkpointless.state import rng


@pytest.fixture(autouse=True)
def no_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler_state = pytest.importorskip("checkpointless.integrations.lightning.data.sampler_state")
    monkeypatch.setattr(rng, "_sources", {})
    monkeypatch.setattr(sampler_state, "_kept", [])
