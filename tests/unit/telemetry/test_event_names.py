"""Every event has one name, and the pages name the stages."""

import json
import re
from pathlib import Path

import pytest

from checkpointless.observability.monitoring.metrics import MEASURED_STAGES
from checkpointless.observability.telemetry.event_names import STAGES, EventName
from checkpointless.observability.telemetry.events import EVENTS_FILE, EventLog, read_events
from checkpointless.observability.telemetry.scribe import scribe

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", EventName)
def test_a_member_is_written_as_its_name_and_read_as_itself(tmp_path: Path, name: EventName) -> None:
    EventLog(tmp_path / EVENTS_FILE).emit(name, "point", generation=0, again=name)
    assert scribe.flush()
    line = (tmp_path / EVENTS_FILE).read_bytes()
    assert re.search(rb'"incident":null,"stage":"([a-z_]+)","edge":"point","again":"\1"}\n$', line)
    assert json.loads(line)["stage"] == name.value == str(name) == f"{name}"
    (event,) = read_events(tmp_path)
    assert event.stage is name


@pytest.mark.parametrize(
    ("page", "names"), [("architecture", STAGES), ("concepts", STAGES), ("operations", MEASURED_STAGES)]
)
def test_the_docs_name_the_stages(page: str, names: tuple[EventName, ...]) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    assert not [name for name in names if f"`{name}`" not in text]
