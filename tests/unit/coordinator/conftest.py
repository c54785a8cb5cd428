from pathlib import Path

import pytest

from checkpointless.observability.telemetry.events import EVENTS_FILE
from tests.unit.messaged_job import Job


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Provide a job whose ranks are in their block; its events are in ``tmp_path``."""
    return Job(events=tmp_path / EVENTS_FILE).begin()
