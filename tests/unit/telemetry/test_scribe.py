"""Test what a process writes without waiting for the disk: in order, bounded, over forks and interruptions."""

import functools
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpointless.observability.telemetry import events, scribe, steps
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import EVENTS_FILE, EventLog, read_events
from checkpointless.observability.telemetry.scribe import LogRelay, _Scribe
from checkpointless.observability.telemetry.steps import StepLog
from tests.interrupting import interrupt
from tests.stopped_paths import StoppedPaths
from tests.waiting import wait_until

OWN = {module.__file__ for module in (events, scribe)}


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Scribe]:
    """Yield a scribe of this test alone, which may be left waiting for a disk."""
    own = _Scribe()
    for module in (events, steps, scribe):
        monkeypatch.setattr(module, "scribe", own)
    monkeypatch.setattr(scribe, "herald", own)
    yield own
    assert own.close(60)


def stages(run_dir: Path) -> list[str]:
    return [event.stage for event in read_events(run_dir)]


def test_nobody_waits_for_a_stopped_disk_and_events_come_when_it_is_back(tmp_path: Path, mine: _Scribe) -> None:
    log, stopped = EventLog(tmp_path / EVENTS_FILE), StoppedPaths(tmp_path / EVENTS_FILE)
    for number in range(50):
        log.emit(EventName.DATA, "point", generation=number)
    with log.span(EventName.BARRIER, generation=50):
        assert not mine.flush(0.2), "the disk does not answer"
    stopped.go_on()
    assert mine.flush(60)
    assert sorted(event.generation for event in read_events(tmp_path)) == [*range(50), 50, 50]


def test_what_waits_is_bounded_chatter_goes_first_and_the_number_is_written(
    tmp_path: Path, mine: _Scribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scribe, "MAX_WAITING", 10)
    monkeypatch.setattr(scribe, "MAX_CHATTER_WAITING", 5)
    gate = threading.Event()
    mine.put(gate.wait)
    wait_until(mine._waiting.empty)
    log = EventLog(tmp_path / EVENTS_FILE, node=2, rank=1)
    for number in range(20):
        log.emit(EventName.PROGRESS, "point", generation=number)
        log.emit(EventName.ABORT, "begin", generation=number)
    gate.set()
    assert mine.flush(60)
    written = read_events(tmp_path)
    (dropped,) = [event for event in written if event.stage == EventName.EVENTS_DROPPED]
    assert (dropped.fields, dropped.node, dropped.rank, dropped.pid) == ({"count": 30}, 2, 1, os.getpid())
    assert [event.generation for event in written if event.stage == EventName.PROGRESS] == [0, 1, 2]
    assert [event.generation for event in written if event.stage == EventName.ABORT] == list(range(7))
    log.emit(EventName.ABORT, "end", generation=20)
    assert stages(tmp_path)[-1] == "abort"
    assert stages(tmp_path).count("events_dropped") == 1


def test_a_disk_that_refuses_is_complained_of_once_and_written_to_again_as_soon_as_it_takes_lines(
    tmp_path: Path, mine: _Scribe, caplog: pytest.LogCaptureFixture
) -> None:
    log = EventLog(tmp_path / "run" / EVENTS_FILE)
    for _ in range(2):
        caplog.clear()
        for number in range(3):
            log.emit(EventName.PROGRESS, "point", generation=number)
        assert mine.flush(60)
        assert [record.message for record in caplog.records] == [
            f"events are lost as long as {log.path} cannot be written: No such file or directory"
        ]
        (tmp_path / "run").mkdir()
        log.emit(EventName.DATA, "point", generation=4)
        assert [event.fields.get("count") for event in read_events(tmp_path / "run")] == [3, None]
        log.path.unlink() if log.path else None
        (tmp_path / "run").rmdir()


def test_a_fork_writes_nothing_twice_and_can_write(tmp_path: Path, mine: _Scribe) -> None:
    os.register_at_fork(after_in_child=mine.forget)
    log = EventLog(tmp_path / EVENTS_FILE)
    gate = threading.Event()
    mine.put(gate.wait)
    log.emit(EventName.JOB, "point", generation=0)
    pid = os.fork()
    if pid == 0:
        log.emit(EventName.INIT, "point", generation=0)
        os._exit(0 if mine.flush(60) else 1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    gate.set()
    assert stages(tmp_path) == ["init", "job"]


def test_many_threads_start_one_writer(tmp_path: Path, mine: _Scribe) -> None:
    inside, most = [0], [0]

    def write() -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.0001)
        inside[0] -= 1

    def put() -> None:
        for _ in range(50):
            mine.put(write)
            mine.close(0)

    threads = [threading.Thread(target=put) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: mine.flush(30))  # one that follows on a failed one waits for a tenth of a second only
    assert (inside, most) == ([0], [1])


def test_no_instruction_at_which_emit_is_interrupted_costs_another_event(tmp_path: Path, mine: _Scribe) -> None:
    """The one that was interrupted is written or not; the next one is, and once."""
    log = EventLog(tmp_path / EVENTS_FILE)

    def emit() -> None:
        with log.span(EventName.BARRIER, generation=at, incident="1", ranks=[1, 2]):
            pass

    at = 0
    interrupted = True
    while interrupted:
        at += 1
        if at % 3 == 0:
            assert mine.close(60)  # the thread has to be started, too
        interrupted = interrupt(emit, at, OWN)
        log.emit(EventName.DATA, "point", generation=at)
    assert at > 200, "it was interrupted at each of them"
    written = read_events(tmp_path)
    assert [event.generation for event in written if event.stage == EventName.DATA] == list(range(1, at + 1))
    hits = [(event.generation, event.edge) for event in written if event.stage == EventName.BARRIER]
    assert len(hits) == len(set(hits))
    assert {(at, "begin"), (at, "end")} <= set(hits)


def test_no_interrupted_message_costs_another(mine: _Scribe, caplog: pytest.LogCaptureFixture) -> None:
    package = logging.getLogger("checkpointless.test")
    at = 0
    interrupted = True
    with LogRelay():
        while interrupted:
            at += 1
            interrupted = interrupt(functools.partial(package.warning, "hit %d", at), at, OWN)
            heard = threading.Thread(target=package.warning, args=("next %d", at), daemon=True)
            heard.start()
            heard.join(60)
            assert not heard.is_alive(), f"instruction {at}"
        assert mine.flush(60)
    assert at > 50, "it was interrupted at each of them"
    nexts = [record.message for record in caplog.records if record.message.startswith("next")]
    assert nexts == [f"next {each}" for each in range(1, at + 1)]
    assert f"hit {at}" in caplog.messages


def test_a_message_waits_for_no_handler_and_says_what_was(mine: _Scribe, caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    mine.put(gate.wait)
    ranks = [1]
    with LogRelay():
        try:
            raise ValueError("not a number")
        except ValueError:
            logging.getLogger("checkpointless.test").exception("of ranks %s", ranks)
        ranks.append(2)
        assert not caplog.records
        gate.set()
        assert mine.flush(60)
    (record,) = caplog.records
    assert record.message == "of ranks [1]"
    assert "ValueError: not a number" in caplog.text
    assert record.exc_info is None, "whose frames would keep what they refer to"
    logging.getLogger("checkpointless.test").warning("as before")
    assert caplog.messages[-1] == "as before"


def test_a_step_waits_for_a_stopped_disk_but_a_moment_and_is_not_lost(tmp_path: Path, mine: _Scribe) -> None:
    log = StepLog(tmp_path, 0)
    gate = threading.Event()
    mine.put(gate.wait)
    log.record(1, 0.5, "d1")
    assert not log.path.exists()
    gate.set()
    assert log.last_step() == 1


def test_a_step_that_could_not_be_written_is_said_at_the_next_at_the_latest(tmp_path: Path, mine: _Scribe) -> None:
    log = StepLog(tmp_path, 0)
    log.path.parent.rmdir()
    with pytest.raises(FileNotFoundError):
        log.record(1, 0.5, "d1")
    log.path.parent.mkdir()
    with pytest.raises(FileNotFoundError):
        log.record(2, 0.5, "d2")
