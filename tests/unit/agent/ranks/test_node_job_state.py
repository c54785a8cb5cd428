"""Test what a node knows of its job, and the events that say so."""

from pathlib import Path

import pytest

from checkpointless.launcher.agent.ranks import process_keeper
from checkpointless.launcher.agent.ranks.process_keeper import NodeJobState
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import EVENTS_FILE, EventLog, read_events
from checkpointless.observability.telemetry.scribe import scribe


def test_events_are_of_the_generation_and_the_incident_that_are_known(tmp_path: Path) -> None:
    job = NodeJobState(EventLog(tmp_path / EVENTS_FILE, node=0))
    job.emit(EventName.NOTIFY, "begin")
    job.generation = 4
    job.interrupt("i7", 1.0)
    job.emit(EventName.RESPAWN, "begin", rank=1)
    scribe.flush()
    found = [(event.generation, event.incident, event.rank) for event in read_events(tmp_path)]
    assert found == [(0, None, None), (4, "i7", 1)]


def test_an_incident_that_this_node_was_not_told_of_begins_at_this_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_keeper.time, "monotonic", lambda: 50.0)
    job = NodeJobState(EventLog(None))
    assert job.fault_at("i1") == 50.0
    job.interrupt("i1", 7.5)
    assert (job.fault_at("i1"), job.fault_at("i2")) == (7.5, 50.0)
