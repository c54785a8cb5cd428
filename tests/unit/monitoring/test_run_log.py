"""Test what is read from the event log as it grows, breaks and is replaced, and what is counted of it."""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.launcher.agent.watch import Watch
from checkpointless.observability.monitoring import metrics as metrics_module
from checkpointless.observability.monitoring.metrics import (
    EVENT_METRICS,
    MEASURED_STAGES,
    Metrics,
    RankStatus,
    RunLog,
    Snapshot,
)
from checkpointless.observability.report.summary import build_report
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import (
    EVENTS_FILE,
    Event,
    EventLog,
    LineTail,
    append_line,
    read_events,
)
from checkpointless.observability.telemetry.scribe import scribe
from tests.unit.made_up_run import MadeUpRun
from tests.unit.monitoring.test_pages import SNAPSHOT, get, samples
from tests.waiting import wait_until

OWN = (2, 3)
Counted = Callable[[], Watch]


def values(metrics: Metrics, name: str, suffix: str = "_total") -> dict[str, float]:
    """Return the values of a metric that is counted, by the value of its label ("" without one)."""
    label = next(metric.label for metric in EVENT_METRICS if metric.name == name)
    return {
        sample.labels.get(label, ""): sample.value
        for family in metrics._counted[name].collect()
        for sample in family.samples
        if sample.name.endswith(suffix)
    }


def rank(number: int) -> RankStatus:
    return RankStatus(number, "running", 1, 0, None, None, None)


@pytest.fixture
def counted(tmp_path: Path) -> Counted:
    """Return a function that reads the log and returns what has counted it, for ranks 2 and 3 of node 1."""
    watch = Watch(1)
    watch.log(tmp_path / EVENTS_FILE)
    watch.snapshot = Snapshot(1, ranks=tuple(map(rank, OWN)))

    def read() -> Watch:
        assert scribe.flush()
        assert watch.run_log is not None
        watch.run_log.look(time.monotonic())
        return watch

    return read


def emit(folder: Path, stage: str, edge: Any, of: int | None, generation: int, **fields: Any) -> None:
    incident = fields.pop("incident", str(generation))
    log = EventLog(folder / EVENTS_FILE, node=1 if of in (None, *OWN) else 0, rank=of)
    log.emit(EventName(stage), edge, generation=generation, incident=incident, **fields)


def test_stages_and_bytes_are_those_of_this_nodes_ranks_in_incidents(tmp_path: Path, counted: Counted) -> None:
    counts = values(counted().metrics, "stage_seconds", "_count")
    assert counts == dict.fromkeys(MEASURED_STAGES, 0)
    for of in (0, 2, 3):  # rank 0 is another node's
        emit(tmp_path, "abort", "end", of, 0, seconds=0.25, incident=None)  # it does not know the incident yet
        emit(tmp_path, "transfer", "begin", of, 1)
        emit(tmp_path, "transfer", "end", of, 1, seconds=0.5, bytes=100)
        emit(tmp_path, "init", "end", of, 1, seconds=9.0, error="RankShouldRestart")  # it was broken off
    emit(tmp_path, "init", "end", 2, 0, seconds=9.0, incident=None)  # the job begins
    emit(tmp_path, "notify", "end", None, 0, seconds=0.125)
    metrics = counted().metrics
    counts, sums = (values(metrics, "stage_seconds", suffix) for suffix in ("_count", "_sum"))
    measured = {stage: (count, sums[stage]) for stage, count in counts.items() if count}
    assert measured == {"abort": (2, 0.5), "transfer": (2, 1.0), "notify": (1, 0.125)}
    assert values(metrics, "transfer_bytes") == {"": 200}


NO_EVENTS = (
    b'{"node":1,"rank":2,' + b"[" * 20_000,
    b'{"node":1,"rank":2,"stage":"abort","edge":"end","generation":null,"seconds":1}',
    b'["node":1,"rank":2,]',
)


@given(st.lists(st.binary(max_size=60) | st.sampled_from(NO_EVENTS)))
def test_what_is_no_event_is_left_out(tmp_path_factory: pytest.TempPathFactory, found: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("log") / EVENTS_FILE
    path.write_bytes(b"\n".join([*found, b""]))
    taken: list[Event] = []
    reader = RunLog(path, 1, lambda: frozenset(OWN), taken.append)
    reader.look(0.0)
    assert taken == []


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunLog]:
    monkeypatch.setattr(metrics_module, "_EVERY_S", 0.01)
    reader = RunLog(tmp_path / EVENTS_FILE, 0, frozenset, lambda _: None)
    yield reader
    reader.close()


def test_the_log_is_read_while_one_asks(asked: RunLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, disturbed_run().events, monkeypatch)
    time.sleep(0.05)
    assert asked.report.goodput is None, "nobody has asked"
    wait_until(lambda: asked.ask(None).goodput is not None)


# ---- the account


def write(run_dir: Path, events: list[Event], monkeypatch: pytest.MonkeyPatch) -> None:
    """Write events into a log, at the times that they have."""
    for event in events:
        with monkeypatch.context() as patch:
            patch.setattr("time.time_ns", lambda ns=event.ts: ns)
            patch.setattr("time.monotonic_ns", lambda ns=event.mono: ns)
            about: dict[str, Any] = {"generation": event.generation, "incident": event.incident, **event.fields}
            log = EventLog(run_dir / EVENTS_FILE, node=event.node, rank=event.rank)
            log.emit(event.stage, event.edge, **about)  # type: ignore[arg-type]
    assert scribe.flush()


def disturbed_run() -> MadeUpRun:
    run = MadeUpRun()
    run.start()
    run.incident(31.0, "1", committed=21, resumed=15)
    run.add(100.0, "progress", "point", high_water=60)
    return run


def reader_of(run_dir: Path) -> RunLog:
    return RunLog(run_dir / EVENTS_FILE, 0, frozenset, lambda _: None)


def test_the_account_is_that_of_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = disturbed_run()
    write(tmp_path, run.events[:30], monkeypatch)
    reader = reader_of(tmp_path)  # what was written before it began belongs to the run, too
    reader.look(0.0)
    write(tmp_path, run.events[30:], monkeypatch)
    reader.look(1e9)
    assert reader.report == build_report(str(tmp_path), read_events(tmp_path))
    found = reader.report.run
    assert (found.first_step, found.last_step, found.steps) == (1, 60, 60)


def test_metrics_and_status_have_the_sums_of_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = disturbed_run()
    watch = Watch(0)
    watch.log(tmp_path / EVENTS_FILE)
    watch.snapshot = SNAPSHOT
    write(tmp_path, run.events, monkeypatch)
    assert watch.run_log is not None
    monkeypatch.setattr(watch.run_log, "_read", lambda: None)
    watch.run_log.look(0.0)
    goodput = build_report(str(tmp_path), read_events(tmp_path)).goodput
    assert goodput is not None
    said = json.loads(get(watch, "/status")[1])["goodput"]
    assert (said["seconds"], said["goodput"]) == (goodput.seconds, goodput.ratio)
    found = samples(get(watch, "/metrics")[1])
    sums = {cause: value for (name, cause), value in found.items() if name == "wall_seconds"}
    assert {cause: value for cause, value in sums.items() if value} == goodput.seconds
    assert sums["hang"] == sums["saves"] == 0
    assert found["goodput_ratio", ""] == goodput.ratio


def test_a_log_that_is_too_long_has_no_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics_module, "MAX_EVENTS", 10)
    reader = reader_of(tmp_path)
    append_line(tmp_path / EVENTS_FILE, "no event")
    write(tmp_path, disturbed_run().events[:11], monkeypatch)
    with caplog.at_level(logging.WARNING):
        for now_s in (0.0, 1e6):
            reader.look(now_s)
    assert (reader.report.goodput, caplog.text.count("over 10 events")) == (None, 1)


# ---- the file


def test_a_file_that_is_cut_rotated_or_removed_is_read_on(tmp_path: Path) -> None:
    log = tmp_path / "log"
    tail = LineTail(log, 1000)
    assert tail.lines() == []
    log.write_bytes(b"a longer line\n")
    assert tail.lines() == [b"a longer line"]
    os.truncate(log, 0)
    with log.open("ab") as file:
        file.write(b"cut\n")
    assert tail.lines() == [b"cut"]
    log.rename(tmp_path / "old")
    log.write_bytes(b"another one of the same length or more\n")
    assert tail.lines() == [b"another one of the same length or more"]
    log.unlink()
    assert tail.lines() == []
    log.write_bytes(b"back\n")
    assert tail.lines() == [b"back"]


def test_no_more_than_so_much_is_read_at_a_time_and_longer_lines_are_left_out(tmp_path: Path) -> None:
    log = tmp_path / "log"
    tail = LineTail(log, max_bytes=16)
    log.write_bytes(b"one\n" + b"x" * 100 + b"\ntwo\nthree\n")
    reads = [tail.lines() for _ in range(12)]
    assert [line for read in reads for line in read if line] == [b"one", b"two", b"three"]
    assert all(sum(map(len, read)) <= 16 for read in reads)


@given(st.lists(st.binary(max_size=12).filter(lambda line: b"\n" not in line), max_size=12), st.integers(16, 40))
def test_every_line_is_read_once_however_it_is_cut(tmp_path_factory: Any, said: list[bytes], size: int) -> None:
    log = tmp_path_factory.mktemp("log") / "log"
    tail = LineTail(log, max_bytes=size)
    data = b"".join(line + b"\n" for line in said)
    with log.open("ab", buffering=0) as file:
        found: list[bytes] = []
        for at in range(0, len(data), 7):
            file.write(data[at : at + 7])
            found += tail.lines()
        found += [line for _ in range(len(data) // 4 + 1) for line in tail.lines()]
    assert found == said
