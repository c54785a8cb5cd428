"""A healthy process that was replaced is seen."""

from pathlib import Path

import pytest

from checkpointless.faults.ledger import FaultLedger
from checkpointless.faults.spec import parse
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import EVENTS_FILE, EventLog
from checkpointless.system.environment import RUN_DIR_ENV
from tests.ranks.users import end
from tests.ranks.users.processes import replaced_healthy


def entered(monkeypatch: pytest.MonkeyPatch, run_dir: Path, rank: int, *pids: int) -> None:
    monkeypatch.setenv(RUN_DIR_ENV, str(run_dir))
    monkeypatch.setenv("RANK", str(rank))
    for pid in pids:
        monkeypatch.setattr("os.getpid", lambda pid=pid: pid)
        end.note("process", fit=0)


@pytest.fixture
def run_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make up a run in which ranks 0 and 1 were replaced; rank 1, and rank 2's only process, had a fault."""
    entered(monkeypatch, tmp_path, 0, 10, 10, 20)
    entered(monkeypatch, tmp_path, 1, 11, 21)
    entered(monkeypatch, tmp_path, 2, 12, 12)
    ledger = FaultLedger(tmp_path)
    for index, (text, pid) in enumerate([("sigkill@forward:rank=1,step=2", 11), ("oom@data:rank=2,step=3", 12)]):
        monkeypatch.setattr("os.getpid", lambda pid=pid: pid)
        assert ledger.claim(index, parse(text))
    log = EventLog(tmp_path / EVENTS_FILE)
    for rank in (0, 1):
        log.emit(EventName.RESPAWN, "begin", generation=1, rank=rank)
    return tmp_path


def test_one_that_no_fault_came_in_is_told(run_dir: Path) -> None:
    assert replaced_healthy(run_dir, range(3)) == ("0:10",)
    assert replaced_healthy(run_dir, (1, 2)) == ()


def test_an_exception_does_not_excuse_it(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered(monkeypatch, run_dir, 2, 22)
    EventLog(run_dir / EVENTS_FILE).emit(EventName.RESPAWN, "begin", generation=2, rank=2)
    assert replaced_healthy(run_dir, range(3)) == ("0:10", "2:12")


def test_one_that_never_entered_the_block_is_told(run_dir: Path) -> None:
    EventLog(run_dir / EVENTS_FILE).emit(EventName.RESPAWN, "begin", generation=2, rank=1)
    assert replaced_healthy(run_dir, range(3)) == ("0:10", "1:?")
