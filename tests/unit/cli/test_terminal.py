"""Test what the terminal shows of an incident, from events of the shape that real runs have, and of the end."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpointless.cli.terminal import Terminal, _Narrator
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import EVENTS_FILE, EventLog, read_events
from checkpointless.observability.telemetry.scribe import keep_traceback, scribe, traceback_path
from checkpointless.system.environment import RUN_DIR_ENV
from tests.unit.made_up_run import MadeUpRun
from tests.waiting import wait_until

CAUSE = "rank 1 raised ValueError at step 3: no"
FIRST, LAST = f"incident 1: {CAUSE}; recovering", "incident 1: recovered in 1.25 s"
RANKS = (0, 1)


def ranks_end(log: EventLog, generation: int, *stages: str, ranks: tuple[int, ...] = RANKS, **fields: Any) -> None:
    for stage in stages:
        for rank in ranks:
            log.emit(EventName(stage), "end", generation=generation, rank=rank, seconds=0.1 * (rank + 1), **fields)


def detect(log: EventLog, generation: int, name: str) -> None:
    more: dict[str, Any] = {"cause": CAUSE, "culprit": 1, "how": "exception"}
    log.emit(EventName.DETECT, "point", generation=generation, incident=name, **more)


def incident(log: EventLog, number: int = 1) -> None:
    """Log an incident from the fault of generation ``number - 1`` until all ranks may enter the next one."""
    generation, name = number - 1, str(number)
    detect(log, generation, name)
    ranks_end(log, generation, "abort", "finalize", "health")
    for rank in RANKS:
        log.emit(EventName.BARRIER, "begin", generation=generation, rank=rank, incident=name)
    log.emit(EventName.GO, "point", generation=number, incident=name, high_water=2)


def recovery(log: EventLog, number: int = 1) -> None:
    ranks_end(log, number, "init", "rebuild")
    ranks_end(log, number, "decide", target=2)
    ranks_end(log, number, "transfer", ranks=(0,), bytes=0, sources=[])
    ranks_end(log, number, "transfer", ranks=(1,), bytes=1_629_284, sources=[0])
    ranks_end(log, number, "verify", "data")
    ranks_end(log, number, "first_step", step=3)


def recovered(log: EventLog, number: int = 1) -> None:
    log.emit(EventName.RECOVERED, "point", generation=number, incident=str(number), seconds=1.25)


@pytest.fixture
def log(tmp_path: Path) -> EventLog:
    """Provide the log of a job that has begun."""
    made = EventLog(tmp_path / EVENTS_FILE, node=0)
    made.emit(EventName.JOB, "begin", generation=0, nproc=len(RANKS), nnodes=1)
    return made


@pytest.fixture
def narrator(tmp_path: Path) -> _Narrator:
    return _Narrator(tmp_path, 0, os.getpid())


def told(narrator: _Narrator, log: EventLog) -> list[str]:
    assert log.path is not None
    lines: list[str] = []
    for event in read_events(log.path.parent):
        lines += narrator.take(event, 0.0)
    return lines


def test_an_incident_is_a_block_of_a_dozen_lines(narrator: _Narrator, log: EventLog) -> None:
    incident(log)
    log.emit(EventName.RESPAWN, "begin", generation=1, rank=1, incident="1")
    recovery(log)
    recovered(log)
    lines = told(narrator, log)
    stages = "abort finalize barrier init rebuild decide transfer first_step"
    assert [line.split()[0] for line in lines] == stages.split()
    assert "rank 1 filled with 1.63 MB from rank 0" in lines[6]
    assert "resume after step 2" in lines[5]
    assert "0.20 s" in lines[0]  # the slowest rank's
    assert not narrator.is_telling


def test_other_coordinators_incidents_are_theirs(tmp_path: Path, log: EventLog) -> None:
    incident(log)
    recovery(log)
    recovered(log)
    assert told(_Narrator(tmp_path, 1, os.getpid()), log) == []
    assert told(_Narrator(tmp_path, 0, os.getpid() + 1), log) == []


def test_a_second_fault_begins_a_second_block(narrator: _Narrator, log: EventLog) -> None:
    incident(log)
    ranks_end(log, 1, "init")
    incident(log, 2)
    recovery(log, 2)
    assert [line.split()[0] for line in told(narrator, log)].count("barrier") == 2
    assert narrator.is_telling
    recovered(log, 2)
    told(narrator, log)
    assert not narrator.is_telling


def test_a_loop_of_ones_own_has_no_stages_of_a_framework(narrator: _Narrator, log: EventLog) -> None:
    incident(log)
    ranks_end(log, 1, "decide", target=2)
    ranks_end(log, 1, "transfer", bytes=0, sources=[])
    ranks_end(log, 1, "enter", "data")
    ranks_end(log, 1, "first_step", step=3)
    recovered(log)
    assert [line.split()[0] for line in told(narrator, log)[3:]] == ["decide", "transfer", "first_step"]
    assert not narrator.is_telling, "it waits for stages that never come"


@pytest.mark.parametrize("is_late", [True, False], ids=["the-start's-word-is-late", "a-successor-of-a-move-waited"])
def test_a_wait_during_training_is_not_the_incidents(narrator: _Narrator, log: EventLog, is_late: bool) -> None:
    words = (EventName.BARRIER, 1), (EventName.GO, None)
    for word, rank in words if is_late else words[::-1]:
        log.emit(word, "point" if rank is None else "begin", generation=0, rank=rank)
    incident(log)
    events = list(read_events(log.path.parent)) if log.path is not None else []
    for index in range(4 if is_late else 3):  # a minute before what follows, the late word with a fault
        events[index] = replace(events[index], mono=events[index].mono - 60 * 10**9)
    late = events.pop(1)
    waits = [event for event in events if event.stage == EventName.BARRIER and event.rank == 1]
    if is_late:  # rank 1 is lost, and its first word is written after the coordinator's own
        events = [event for event in events if event not in waits]
    else:
        events.remove(waits[-1])
    events.insert(2 if is_late else 1, late)
    (barrier,) = [line for event in events for line in narrator.take(event, 0.0) if "barrier" in line]
    assert float(barrier.split()[1]) < 4.0, barrier


def test_a_long_import_is_told_of(narrator: _Narrator, log: EventLog) -> None:
    told(narrator, log)  # at 0 s
    said = [list(narrator.tick(at_s)) for at_s in (1.0, 3.0, 4.0)]
    assert said == [[], ["importing what the ranks need, once for all of them: 3 s so far"], []]
    assert len(list(narrator.tick(20.0))) == 1
    log.emit(EventName.PRELOAD, "point", generation=0, seconds=20.0, failed=[])
    told(narrator, log)
    assert not list(narrator.tick(60.0))


def test_silence_is_broken(narrator: _Narrator, log: EventLog) -> None:
    detect(log, 0, "1")
    log.emit(EventName.BARRIER, "begin", generation=0, rank=0)
    told(narrator, log)
    said = [list(narrator.tick(at_s)) for at_s in (4.0, 6.0, 7.0)]
    assert said == [[], ["  barrier: 1 of 2 ranks are here; waiting for the others"], []]


def test_the_terminal_shows_each_line_once_and_in_order(tmp_path: Path, log: EventLog) -> None:
    shown: list[str] = []
    with Terminal(shown.append, tmp_path, 0) as terminal:
        terminal.say("hello")
        terminal.say("hello")
        terminal.say(FIRST)
        incident(log)
        recovery(log)
        recovered(log)
        terminal.say(LAST)
        terminal.say("bye")
    assert (shown[:3], shown[-2:]) == (["hello", "hello", FIRST], [LAST, "bye"])
    assert len(shown) == len({*shown}) + 1  # the greeting came twice


def test_lines_are_shown_although_the_clock_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    terminal = Terminal(shown.append, tmp_path, 0)
    monkeypatch.setattr("time.time_ns", lambda: 10**18)
    terminal.say("said before")
    monkeypatch.setattr("time.time_ns", lambda: 10**9)
    with terminal:
        pass
    assert shown == ["said before"]


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])  # whoever opens a pipe to read waits for a writer
def test_without_a_readable_log_the_agents_lines_are_shown(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / EVENTS_FILE
    make(path)
    shown: list[str] = []
    with Terminal(shown.append, tmp_path, 0) as terminal:
        terminal.say(FIRST)
        wait_until(lambda: shown == [FIRST])
        terminal.say("bye")
    assert shown == [FIRST, "bye"]
    if make is os.mkfifo:
        os.close(os.open(path, os.O_RDWR))


def test_a_traceback_is_kept_and_a_full_disk_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUN_DIR_ENV, raising=False)
    keep_traceback(0, 1, "nowhere")
    monkeypatch.setenv(RUN_DIR_ENV, str(tmp_path))
    keep_traceback(3, 1, "Traceback: \udc80")
    assert scribe.flush()
    assert traceback_path(tmp_path, 3, 1).read_text() == "Traceback: \\udc80"
    monkeypatch.setenv(RUN_DIR_ENV, str(tmp_path / "missing"))
    keep_traceback(3, 1, "nowhere")


def test_odd_lines_and_errors_do_not_silence_the_terminal(
    tmp_path: Path, log: EventLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shown: list[str] = []

    def write(line: str) -> None:
        if "cannot be shown" in line:
            raise RuntimeError("the terminal is odd")
        shown.append(line)

    def breaks(*_: object) -> object:
        raise RuntimeError("a defect of ours")

    with Terminal(write, tmp_path, 0) as terminal:
        assert scribe.flush()
        whole = (tmp_path / EVENTS_FILE).read_bytes()
        for odd in (b"Infinity", b"1" + b"0" * 400, b'"soon"'):
            with (tmp_path / EVENTS_FILE).open("ab") as file:
                file.write(whole.replace(b'"ts":', b'"ts":' + odd + b',"was":'))
        terminal.say("one")
        wait_until(lambda: shown == ["one"])
        terminal.say("this cannot be shown")
        monkeypatch.setattr(_Narrator, "tick", breaks)
        monkeypatch.setattr(_Narrator, "take", breaks)
        incident(log)
        terminal.say("two")
        wait_until(lambda: shown == ["one", "two"])
        monkeypatch.undo()
        incident(log, 2)
        terminal.say("three")
    assert shown[-1] == "three"
    assert any(line.startswith("  barrier") for line in shown)
    assert [record.message for record in caplog.records if record.exc_info] == ["something of the job is not shown"]


def closing_line(run_dir: Path, status: int) -> str:
    return Terminal(print, run_dir, 0).closing_line(status)


def test_it_says_steps_incidents_seconds_and_where_the_report_is(tmp_path: Path) -> None:
    run = MadeUpRun()
    run.start(at_s=10)
    took_s = [run.incident(31.0, "1", committed=21) - 31.1, run.incident(51.0, "2", committed=41) - 51.1]
    run.end(100.0, step=85)
    line = closing_line(run.write(tmp_path / "run"), 0)
    done = f"done: 85 steps, 2 incidents, {sum(took_s):.2f} s lost"
    assert line == f"{done}; report: checkpointless report {tmp_path / 'run'}"


def test_only_the_steps_of_this_run_count(tmp_path: Path) -> None:
    run = MadeUpRun(ranks=1)
    run.span(10.0, "first_step", 0, step=101)
    run.end(20.0, step=140)
    report = f"checkpointless report '{tmp_path / 'a run'}'"
    assert closing_line(run.write(tmp_path / "a run"), 1) == f"failed: 40 steps, no incidents; report: {report}"


def test_a_job_without_steps_and_incidents_says_nothing_and_one_with_incidents_counts_these(tmp_path: Path) -> None:
    run = MadeUpRun()
    run.add(0.0, "job", "begin", nproc=2)
    run.end(9.0)
    assert closing_line(run.write(tmp_path / "a"), 0) == ""
    run.events.pop()
    run.add(4.0, "detect", "point", incident="1", cause="rank 1 failed", culprit=1, how="exception")
    run.end(9.0, code=1, reason="no")
    assert closing_line(run.write(tmp_path / "b"), 1).startswith("failed: 1 incident, 5.00 s lost; report: ")


def test_a_log_that_cannot_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / EVENTS_FILE).mkdir()
    assert closing_line(tmp_path, 0).startswith("done: its log cannot be read: Is a directory; report: ")
