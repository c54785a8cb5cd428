"""Test what is read from the event log as it grows, breaks and is replaced, and what is counted of it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.faults.spec import FaultKind
from checkpointless.observability.monitoring import event_reader
from checkpointless.observability.monitoring.measured import (
    MEASURED_STAGES,
    QUIET_S,
    Measured,
    MeasuredTally,
    Measuring,
)
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import EVENTS_FILE, EventLog, flush_events
from checkpointless.observability.telemetry.lines import LineTail

OWN = frozenset({2, 3})
STARTING = ("enter", "init", "rebuild", "decide", "transfer", "verify", "data", "first_step")


class Lines:
    """Writes lines of an event log, as the processes of a job do."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / EVENTS_FILE

    def end(self, stage: str, rank: int | None, generation: int, seconds: float, **fields: Any) -> None:
        incident = fields.pop("incident", str(generation + 1))
        EventLog(self.path, node=1 if rank in (None, *OWN) else 0, rank=rank).emit(
            EventName(stage), "end", generation=generation, incident=incident, seconds=seconds, **fields
        )

    def begin(self, stage: str, rank: int | None, generation: int) -> None:
        EventLog(self.path, node=1, rank=rank).emit(EventName(stage), "begin", generation=generation, incident="1")

    def recovery(self, ended: int, *ranks: int, seconds: float = 1.0) -> None:
        """Write what living ranks write of an incident; each takes ``seconds`` longer than the one before."""
        for number, rank in enumerate(ranks, start=1):
            self.end("abort", rank, ended, number * seconds, incident=None)
            self.end("finalize", rank, ended, number * seconds)
            for stage in STARTING:
                more = {"bytes": 100} if stage == EventName.TRANSFER else {}
                self.end(stage, rank, ended + 1, number * seconds, **more)

    def all(self) -> list[bytes]:
        assert flush_events()
        lines = self.path.read_bytes().splitlines()
        self.path.unlink()
        return lines


@pytest.fixture
def lines(tmp_path: Path) -> Lines:
    return Lines(tmp_path)


def counted(tally: MeasuredTally) -> dict[str, tuple[int, float]]:
    """Return how many there were of each stage, and how long they took; leave out stages without any."""
    found = tally.measured().stages
    return {stage: (each.counts[-1], each.seconds) for stage, each in found.items() if each.counts[-1]}


def test_of_an_incident_the_slowest_rank_of_the_node_counts_once(lines: Lines) -> None:
    tally = MeasuredTally()
    lines.end("notify", None, 0, 0.5)
    lines.recovery(0, 0, 1, seconds=7.0)  # ranks of another node
    lines.recovery(0, 2)
    tally.take(lines.all(), 1, OWN, 0.0)
    tally.close(OWN, 0.0)
    assert counted(tally) == {}, "rank 3 has not made a step again"
    lines.end("data", 3, 1, 4.0)
    lines.end("data", 3, 1, 4.5)  # several ends of a rank add up
    lines.end("first_step", 3, 1, 0.25)
    tally.take(lines.all(), 1, OWN, 1.0)
    tally.close(OWN, 1.0)
    ones = dict.fromkeys(("abort", "finalize", *STARTING), (1, 1.0))
    assert counted(tally) == {**ones, "notify": (1, 0.5), "data": (1, 8.5)}
    assert tally.measured().transfer_bytes == 100
    lines.end("first_step", 2, 1, 99.0)  # this is too late to be counted again
    tally.take(lines.all(), 1, OWN, 2.0)
    tally.close(OWN, 2.0, over=True)
    assert counted(tally)["first_step"] == (1, 1.0)


def test_an_incident_that_another_overtakes_counts_as_far_as_it_came(lines: Lines) -> None:
    tally = MeasuredTally()
    lines.end("abort", 2, 0, 2.0)
    lines.end("init", 2, 1, 3.0, error="RankShouldRestart")  # what was broken off does not count
    lines.recovery(1, 2, 3)
    tally.take(lines.all(), 1, OWN, 0.0)
    tally.close(OWN, 0.0)
    found = counted(tally)
    assert found["abort"] == (2, 4.0)
    assert found["init"] == (1, 2.0)


def test_a_block_without_steps_counts_when_the_job_is_over_or_nothing_is_heard_any_more(lines: Lines) -> None:
    for ends in ({"now_s": 1.0, "over": True}, {"now_s": QUIET_S + 1}):
        tally = MeasuredTally()
        lines.end("abort", 2, 0, 2.0)
        tally.take(lines.all(), 1, OWN, 0.0)
        tally.close(OWN, QUIET_S)
        assert counted(tally) == {}
        tally.close(OWN, **ends)  # type: ignore[arg-type]
        assert counted(tally) == {"abort": (1, 2.0)}


def test_a_stage_that_takes_long_is_waited_for_unless_its_process_died(lines: Lines) -> None:
    tally = MeasuredTally()
    lines.end("abort", 2, 0, 2.0)
    lines.begin("finalize", 2, 0)
    tally.take(lines.all(), 1, OWN, 0.0)
    tally.close(OWN, 2 * QUIET_S)
    assert counted(tally) == {}
    lines.begin("respawn", 2, 0)
    lines.end("respawn", 2, 0, 0.75)
    tally.take(lines.all(), 1, OWN, 0.0)
    tally.close(OWN, 2 * QUIET_S)
    assert counted(tally) == {"abort": (1, 2.0), "respawn": (1, 0.75)}


def test_the_jobs_beginning_is_no_incident(lines: Lines) -> None:
    tally = MeasuredTally()
    for stage in ("barrier", *STARTING):
        lines.end(stage, 2, 0, 1.0, incident=None)
    tally.take(lines.all(), 1, OWN, 0.0)
    tally.close(OWN, 0.0, over=True)
    assert counted(tally) == {}


def test_faults_on_purpose_are_counted_by_kind_and_unknown_ones_together(lines: Lines) -> None:
    tally = MeasuredTally()
    assert tally.measured().faults == dict.fromkeys((kind.value for kind in FaultKind), 0)
    for rank, spec in ((2, "hang@forward:rank=2"), (3, "sigkill:rank=3"), (3, "x" * 99), (0, "hang")):
        EventLog(lines.path, node=1, rank=rank).emit(EventName.FAULT_INJECTED, "point", generation=0, spec=spec)
    tally.take(lines.all(), 1, OWN, 0.0)
    found = {kind: count for kind, count in tally.measured().faults.items() if count}
    assert found == {"hang": 1, "sigkill": 1, "other": 1}


@given(
    st.lists(
        st.binary(max_size=60)
        | st.sampled_from(
            [
                b'{"node":1,"rank":2,' + b"[" * 20_000,
                b'{"node":1,"rank":2,"stage":"abort","edge":"end","generation":null,"seconds":1}',
                b'{"node":1,"rank":2,"stage":["abort"],"edge":"end","generation":0,"seconds":1}',
                b'{"node":1,"rank":2,"stage":"abort","edge":"end","generation":0,"seconds":"nan"}',
                b'{"node":1,"rank":2,"stage":"abort","edge":"end","generation":0,"seconds":NaN}',
                b'{"node":1,"rank":2,"stage":"abort","edge":"end","generation":0,"seconds":-1}',
                b'{"node":1,"rank":2,"stage":"transfer","edge":"end","generation":1,"incident":"1","bytes":"x"}',
                b'["node":1,"rank":2,]',
            ]
        )
    )
)
def test_what_is_no_event_is_left_out(found: list[bytes]) -> None:
    tally = MeasuredTally()
    tally.take(found, 1, OWN, 0.0)
    tally.close(OWN, 0.0, over=True)
    assert counted(tally) == {}
    assert tally.measured().transfer_bytes == 0


# ---- the file


def test_only_what_is_appended_is_read_and_a_torn_line_when_it_is_whole(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"of another agent\n")
    tail = LineTail(log, 1000)
    assert tail.lines() == []
    with log.open("ab") as file:
        file.write(b"one\ntwo\nth")
        file.flush()
        assert tail.lines() == [b"one", b"two"]
        assert tail.lines() == []
        file.write(b"ree\n")
        file.flush()
        assert tail.lines() == [b"three"]


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


def test_a_log_that_cannot_be_read_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "log").mkdir()
    tail = LineTail(tmp_path / "log", 1000)
    assert tail.lines() == tail.lines() == []
    (record,) = caplog.records
    assert record.message == f"what is appended to {tmp_path / 'log'} is not read: Is a directory"


@pytest.fixture
def asked(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> Iterator[Measuring]:
    monkeypatch.setattr(event_reader, "_EVERY_S", 0.01)
    measuring = Measuring(lines.path, 1, lambda: (OWN, False))
    yield measuring
    measuring.close()


def test_it_is_read_while_somebody_asks(asked: Measuring, lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked.measured.stages.keys() == set(MEASURED_STAGES)
    lines.recovery(0, 2, 3)
    time.sleep(0.05)
    assert nothing(asked.measured), "nobody has asked"
    until_s = time.monotonic() + 10
    while nothing(asked.ask()):
        assert time.monotonic() < until_s
        time.sleep(0.01)
    assert asked.measured.stages["init"].counts[-1] == 1
    monkeypatch.setattr(event_reader, "ASKED_FOR_S", -1.0)
    time.sleep(0.05)
    lines.recovery(1, 2, 3)
    time.sleep(0.05)
    assert asked.measured.stages["init"].counts[-1] == 1, "nobody asks any more"


def nothing(found: Measured) -> bool:
    return found.transfer_bytes == 0 and not any(each.counts[-1] for each in found.stages.values())


def test_what_is_no_longer_the_undisturbed_run_counts_once_per_incident(lines: Lines) -> None:
    tally = MeasuredTally()
    for rank, generation in ((2, 1), (3, 1), (0, 2), (3, 4)):  # rank 0 is another node's
        log = EventLog(lines.path, node=0, rank=rank)
        log.emit(EventName.INEXACT, "point", generation=generation, step=5, loss=1.0, before=2.0)
    tally.take(lines.all(), 1, OWN, 0.0)
    assert tally.measured().inexact == 2


def test_a_spare_counts_nobodys_ranks(lines: Lines) -> None:
    measuring = Measuring(lines.path, 9, lambda: (frozenset(), False))
    lines.recovery(0, 2, 3)
    measuring.look(0.0)
    assert nothing(measuring.measured)
    assert json.loads(lines.all()[0])["rank"] == 2
