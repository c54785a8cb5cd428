"""A run summed up: what its time was spent on, what was lost, what restarts would have cost, how it is shown."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpointless.cli import main
from checkpointless.report.ettr import Activity, Milestones, account
from checkpointless.report.incidents import IncidentSummary, Outcome
from checkpointless.report.restart import DEFAULT_STARTUP_S, RestartOptions, Source
from checkpointless.report.summary import Report, RunState, as_json, build_report
from checkpointless.telemetry.event_names import STAGES, EventName
from checkpointless.telemetry.events import (
    EVENTS_FILE,
    Event,
    EventLog,
    flush_events,
    read_events,
)
from checkpointless.telemetry.rungs import Rung
from checkpointless.telemetry.tracebacks import traceback_path
from checkpointless.telemetry.wording import duration, plural, printable, ranks, share, size
from checkpointless.wire.node_messages import Progress
from tests.unit.made_up_run import UTC, MadeUpRun, S
from tests.unit.messaged_job import Job


def simple_run() -> tuple[MadeUpRun, float]:
    """Ten seconds of start-up, a fault at 31 s after step 21 (a step takes a second), and the end at 100 s."""
    run = MadeUpRun()
    run.start(at_s=10)
    done_s = run.incident(31.0, "1", committed=21, spec="sigkill@optimizer:rank=1,step=22", how="SIGKILL")
    run.end(100.0, step=85)
    return run, done_s


def report_of(run: MadeUpRun, **more: Any) -> Report:
    return build_report("runs/1", run.events, **more)


def test_every_second_is_accounted_for() -> None:
    run, done_s = simple_run()
    spent = report_of(run).spent
    assert spent is not None
    assert (spent.wall_s, spent.startup_s, spent.shutdown_s) == (100.0, 10.0, 1.0)
    assert spent.recovery_s == pytest.approx(done_s - 31)
    assert spent.repeated_s == 0.0
    assert spent.training_s == pytest.approx(100 - 10 - 1 - (done_s - 31))
    assert spent.ettr == pytest.approx((100 - 10 - 1 - (done_s - 31)) / 100)
    assert spent.ettr_while_training == pytest.approx(1 - (done_s - 31) / 89)
    assert [period.activity for period in spent.periods] == [
        Activity.STARTUP,
        Activity.TRAINING,
        Activity.RECOVERY,
        Activity.TRAINING,
        Activity.SHUTDOWN,
    ]


def test_steps_and_samples_lost_and_the_time_to_make_them_again() -> None:
    run = MadeUpRun()
    run.start(at_s=10, samples=16)
    run.incident(31.0, "1", committed=21, resumed=15)
    run.end(100.0, step=80)
    report = report_of(run)
    assert (report.steps_lost, report.samples_lost) == (6, 96)
    assert report.run.step_s == pytest.approx((20 + 99 - 32.3) / (20 + 64), rel=0.02)
    assert report.spent is not None
    assert report.spent.repeated_s == pytest.approx(6 * (report.run.step_s or 0))
    unhurt, _ = simple_run()
    assert report_of(unhurt).steps_lost == 0


def test_what_no_event_says_is_unknown() -> None:
    run = MadeUpRun()
    run.start(samples=None)
    run.incident(31.0, "1", committed=21, resumed=15)
    report = report_of(run)
    assert (report.steps_lost, report.samples_lost) == (6, None)
    assert report.run.state is RunState.OPEN
    plain = MadeUpRun()  # a block that is no training loop we know
    plain.add(0, "job", "begin")
    plain.add(2, "go", "point", high_water=-1)
    plain.add(5, "detect", "point", incident="1", cause="x", culprit=0, how="exit")
    plain.generation = 1
    plain.add(6, "go", "point", incident="1", high_water=-1)
    plain.add(9, "job", "end", code=0, reason=[])
    report = report_of(plain)
    assert report.incidents[0].outcome is Outcome.RESUMED
    assert (report.steps_lost, report.samples_lost, report.run.step_s) == (None, None, None)
    assert report.spent is not None
    assert (report.spent.startup_s, report.spent.recovery_s, report.spent.ettr) == (2.0, 1.0, None)


def test_a_restart_costs_what_the_formula_says() -> None:
    run, done_s = simple_run()
    comparison = report_of(run).comparison
    assert comparison is not None
    (restart,) = comparison.restarts
    assert (restart.detect_s, restart.requeue_s, restart.startup_s, restart.load_s) == (0.1, 0.0, 10.0, 0.0)
    assert restart.redo_s == pytest.approx(21.0)  # all that was trained: less than half of 15 minutes
    assert comparison.recovered_s == pytest.approx(done_s - 31)
    assert comparison.factor == pytest.approx(31.1 / (done_s - 31))
    sources = {each.name: each.source for each in comparison.assumptions}
    assert sources["start-up"] is Source.MEASURED
    assert sources["checkpoint interval"] is Source.ASSUMED
    options = RestartOptions(detect_s=5, requeue_s=60, startup_s=300, load_s=40, interval_s=20)
    comparison = report_of(run, options=options).comparison
    assert comparison is not None
    assert comparison.restart_s == pytest.approx(5 + 60 + 300 + 40 + 10)
    assert {each.source for each in comparison.assumptions} == {Source.GIVEN}
    assert comparison.restarts[0].redo_steps == pytest.approx(10, rel=0.05)
    assert comparison.ettr is not None
    assert comparison.ettr < (report_of(run).spent.ettr or 0)  # type: ignore[union-attr]


def test_a_fault_during_recovery_is_no_restart_of_its_own_and_a_failure_is_not_compared() -> None:
    run = MadeUpRun()
    run.start()
    broken_s = run.incident(31.0, "1", committed=21, until="rebuild")
    run.incident(broken_s, "2", committed=21)
    run.incident(60.0, "3", committed=40, until="decide")
    run.end(61.5, code=1, reason="nobody holds shard 3")
    report = report_of(run)
    assert [incident.outcome for incident in report.incidents] == [
        Outcome.ESCALATED,
        Outcome.RESUMED,
        Outcome.FAILED,
    ]
    assert report.comparison is not None
    (restart,) = report.comparison.restarts
    assert restart.incidents == ("1", "2")
    assert report.comparison.left_out == 1
    assert (report.run.state, report.run.reason) == (RunState.FAILED, "nobody holds shard 3")


def test_a_fault_during_the_start_leaves_the_start_up_to_the_default() -> None:
    run = MadeUpRun()
    run.add(0, "job", "begin")
    run.incident(5.0, "1", committed=0)
    run.end(50.0, step=30)
    report = report_of(run)
    assert report.spent is not None
    assert report.spent.startup_s == pytest.approx(5.1)
    assert report.comparison is not None
    startup = next(each for each in report.comparison.assumptions if each.name == "start-up")
    assert (startup.seconds, startup.source) == (DEFAULT_STARTUP_S, Source.ASSUMED)


def test_a_long_run_that_goes_on_is_known_up_to_its_last_note() -> None:
    run = MadeUpRun()
    run.start(at_s=10)
    for minute in range(1, 61):
        run.add(11 + 60 * minute, "progress", "point", high_water=1 + 30 * minute)
    report = report_of(run)
    assert report.run.step_s == pytest.approx(2.0)
    assert report.run.last_step == 1801
    assert report.spent is not None
    assert report.spent.ettr == pytest.approx(3601 / 3611)


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 50)), max_size=8),
    st.floats(0, 120),
    st.floats(0, 100) | st.none(),
    st.floats(0, 120) | st.none(),
)
def test_periods_tile_the_run_whatever_comes(
    incidents: list[tuple[float, float]], wall_s: float, trains_s: float | None, trained_s: float | None
) -> None:
    def ns(seconds: float | None) -> int | None:
        return None if seconds is None else UTC + round(seconds * S)

    summaries = [
        IncidentSummary(str(n), n, "", None, "", UTC + round(at * S), UTC + round((at + took) * S), took)
        for n, (at, took) in enumerate(sorted(incidents))
    ]
    marks = Milestones(UTC, UTC + round(wall_s * S), ns(trains_s), ns(trained_s))
    spent = account(marks, summaries, None)
    edges = [edge for period in spent.periods for edge in (period.begin_ns, period.end_ns)]
    assert edges[1:-1:2] == edges[2::2]
    assert sum(period.seconds for period in spent.periods) == pytest.approx(spent.wall_s)
    assert all(period.seconds > 0 for period in spent.periods)
    assert spent.ettr is None or 0 <= spent.ettr <= 1


LOGS = st.lists(
    st.builds(
        Event,
        ts=st.integers(0, 10**6),
        mono=st.integers(0, 10**6),
        node=st.integers(0, 1),
        rank=st.none() | st.integers(0, 3),
        pid=st.integers(1, 4),
        generation=st.integers(0, 3),
        incident=st.none() | st.sampled_from(["a", "b"]),
        stage=st.sampled_from([*STAGES, "go", "respawn", "job", "trained", "progress", "rung", "fault_injected"]),
        edge=st.sampled_from(["begin", "end", "point"]),
        fields=st.dictionaries(
            st.sampled_from(
                ["cause", "target", "bytes", "sources", "error", "reason", "step", "high_water", "spec"]
            ),
            st.none() | st.integers() | st.text(max_size=3) | st.lists(st.integers(0, 3), max_size=3),
        ),
    ),
    max_size=40,
)


@settings(max_examples=50)
@given(LOGS)
def test_any_log_has_a_report(events: list[Event]) -> None:
    document = json.loads(as_json(build_report("x", events)))
    assert document["format"] == 1
    time = document["time"]
    assert (time is None) == (not events)
    assert time is None or time["ettr"] is None or 0 <= time["ettr"] <= 1


def test_json_says_what_the_report_says() -> None:
    run, _ = simple_run()
    report = report_of(run, caused={"sigkill@optimizer:rank=1,step=22": 1}, lines_left_out=2)
    document = json.loads(as_json(report))
    assert document["run"]["state"] == "succeeded"
    assert document["run"]["begin"] == "2023-11-14T22:13:20.000Z"
    assert document["run"]["lines_left_out"] == 2
    (incident,) = document["incidents"]
    assert incident["kind"] == "sigkill"
    assert (incident["rung"], incident["outcome"], incident["steps_lost"]) == ("in-process", "resumed", 0)
    assert (incident["nbytes"], incident["sources"]) == (1_500_000, [0])
    assert sum(incident["tiles_s"].values()) == pytest.approx(incident["headline_s"])
    assert document["outcomes"] == {"resumed": 1, "escalated": 0, "failed": 0}
    assert document["restart_from_checkpoint"]["assumptions"][2]["source"] == "measured in this run"


def test_tiles_of_an_incident_add_up_whatever_ranks_do() -> None:
    run = MadeUpRun(ranks=3)
    run.start()
    run.incident(20.0, "1", committed=5, spec="exit@data:rank=1,step=6")
    late = [
        replace(event, ts=event.ts + S, mono=event.mono + S)
        if event.rank == 2
        and event.generation == 1
        and event.stage in (EventName.REBUILD, EventName.DECIDE, EventName.FIRST_STEP)
        else event
        for event in run.events
    ]
    incident = build_report("x", late).incidents[0]
    assert sum(incident.tiles_s.values()) == pytest.approx(incident.headline_s)
    assert incident.tiles_s["rebuild"] == pytest.approx(1.1)


# --- in words -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (None, "unknown"),
        (0.0, "0 s"),
        (0.0001, "<1 ms"),
        (0.0123, "12 ms"),
        (1.268, "1.27 s"),
        (59.96, "60.0 s"),
        (369.2, "6 min 9 s"),
        (900, "15 min"),
        (3599.7, "1 h"),
        (86_399, "1 d"),
        (100_000, "1 d 4 h"),
    ],
)
def test_durations_read_well(seconds: float | None, said: str) -> None:
    assert duration(seconds) == said


def test_other_figures_read_well() -> None:
    assert [size(n) for n in (0, 999, 1_629_284, 5 * 10**18)] == ["0 B", "999 B", "1.63 MB", "5000 PB"]
    assert [share(x) for x in (None, 0.5, 0.9996, 1.0)] == ["unknown", "50.0 %", "99.96 %", "100.0 %"]
    assert [ranks(r) for r in ((), (3,), (0, 1, 2, 5))] == ["no rank", "rank 3", "ranks 0-2, 5"]
    assert plural(1, "line") + plural(2, "line") == "1 line2 lines"


@given(st.text(alphabet=st.characters(exclude_categories=()), max_size=60), st.integers(1, 80))
def test_foreign_text_becomes_one_printable_line(text: str, limit: int) -> None:
    shown = printable(text, limit)
    assert len(shown) <= limit
    assert all(each.isprintable() for each in shown)
    shown.encode()


def test_control_characters_are_shown_by_their_code() -> None:
    assert printable("a\x1b[31mb\u202ec\ud800\n d") == "a\\x1b[31mb\\u202ec\\ud800 d"


# --- the command --------------------------------------------------------------------------------------------------

HOSTILE = '<script>alert(1)</script> [red]\x1b[2J\x07\u202e & "quote" {{ 7 * 7 }}'


def written(tmp_path: Path, run: MadeUpRun) -> Path:
    lines = []
    for event in run.events:
        own = {key: value for key, value in vars(event).items() if key != "fields"}
        lines.append(json.dumps({**own, **event.fields}))
    (tmp_path / EVENTS_FILE).write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def show(*argv: str) -> str:
        assert main(["report", *argv]) == 0
        return capsys.readouterr().out

    return show


def test_the_terminal_shows_it_all(tmp_path: Path, shown: Callable[..., str]) -> None:
    run, _ = simple_run()
    text = shown(str(written(tmp_path, run)), "--restart-load", "40")
    for words in ("1 incident; ended well", "sigkill", "step 21", "rank 0: 1.5 MB", "ETTR", "40.0 s"):
        assert words in text
    for option in ("detect", "requeue", "startup", "load"):
        assert f"--restart-{option}" in text
    assert "finished steps lost: 0" in text
    (bar,) = [line for line in text.splitlines() if "!" in line and ">" in line and "notice" not in line]
    drawn = "".join(mark for mark in bar if mark in "!x=#<>")
    assert len(drawn) == 56
    assert [len(part) for part in re.findall(r"!+|x+|=+|#+|<+|>+", drawn)] == [6, 16, 4, 8, 13, 9]


def test_a_hostile_cause_does_nothing_to_a_terminal(tmp_path: Path, shown: Callable[..., str]) -> None:
    run = MadeUpRun()
    run.start()
    run.incident(20.0, "1", committed=3, cause=HOSTILE)
    run.end(40.0, code=1, reason=HOSTILE)
    text = shown(str(written(tmp_path, run)))
    assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert "[red]" in text


def test_the_traceback_of_the_rank_that_failed_is_on_the_page(tmp_path: Path, shown: Callable[..., str]) -> None:
    run, _ = simple_run()
    for rank in (0, 1):
        path = traceback_path(tmp_path, 0, rank)
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"Traceback (most recent call last):\nValueError: of rank {rank}\n")
    text = shown(str(written(tmp_path, run)), "--html", str(tmp_path / "r.html"))
    assert f"tracebacks in full: {tmp_path / 'tracebacks'}" in text
    assert "ValueError: of rank 1" in (tmp_path / "r.html").read_text()
    assert "ValueError: of rank 0" not in (tmp_path / "r.html").read_text()


def test_json_goes_to_standard_output_alone(tmp_path: Path, shown: Callable[..., str]) -> None:
    run, _ = simple_run()
    document = json.loads(shown(str(written(tmp_path, run)), "--json", "-"))
    assert document["incidents"][0]["kind"] == "sigkill"


def test_empty_torn_and_unfinished_logs_are_shown_for_what_they_are(
    tmp_path: Path, shown: Callable[..., str]
) -> None:
    (tmp_path / EVENTS_FILE).write_text("")
    outputs = [str(tmp_path / name) for name in ("r.json", "r.html", "t.json")]
    argv = [str(tmp_path), "--json", outputs[0], "--html", outputs[1], "--trace", outputs[2]]
    assert "nothing recorded" in shown(*argv)
    assert "Nothing was recorded" in Path(outputs[1]).read_text()
    run, _ = simple_run()
    run.events.pop()
    written(tmp_path, run)
    with (tmp_path / EVENTS_FILE).open("a") as log:
        log.write('{"not": "an event"}\n')
    assert "1 line of the log is torn or no event, and left out" in shown(*argv)
    with (tmp_path / EVENTS_FILE).open("a") as log:
        log.write('{"torn')
    text = shown(*argv)
    assert "2 lines of the log are torn" in text
    assert "no end in its log" in text


def test_an_incident_without_stages(tmp_path: Path, shown: Callable[..., str]) -> None:
    log = EventLog(tmp_path / EVENTS_FILE, rank=0)
    log.emit(EventName.DETECT, "point", generation=0, incident="i1", cause="gone", culprit=0, how="exit")
    log.emit(EventName.RUNG, "point", generation=0, incident="i1", rung="node", why="node 1 was lost")
    assert flush_events()
    page = tmp_path / "r.html"
    text = shown(str(tmp_path), "--html", str(page))
    assert "failed" in text
    assert "node; node 1 was lost" in text
    assert "node 1 was lost" in page.read_text()


def test_of_hundreds_of_incidents_the_terminal_shows_the_newest(tmp_path: Path, shown: Callable[..., str]) -> None:
    run = MadeUpRun()
    run.start()
    for number in range(300):
        run.incident(20.0 + 5 * number, str(number), committed=10 + number)
    text = shown(str(written(tmp_path, run)))
    assert "270 earlier ones" in text
    assert len(text.splitlines()) < 120


@pytest.mark.parametrize("option", ["--json", "--html", "--trace"])
def test_a_file_that_cannot_be_written_is_one_line(
    tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = simple_run()
    assert main(["report", str(written(tmp_path, run)), option, str(tmp_path / "no" / "file")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "x"])
def test_an_assumption_is_a_number_of_seconds(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["report", "x", f"--restart-startup={value}"])
    assert "seconds" in capsys.readouterr().err


def test_a_refused_recovery_names_rung_and_reason() -> None:
    run = MadeUpRun()
    run.start()
    run.incident(31.0, "1", committed=21, until="decide")
    run.add(33.0, "fallback", "point", 0, incident="1", reason="nobody holds shard 3", storage=None)
    incident = report_of(run).incidents[0]
    assert (incident.outcome, incident.rung, incident.steps_up) == (
        Outcome.FAILED,
        Rung.JOB,
        ("nobody holds shard 3",),
    )


def test_a_coordinator_notes_progress_now_and_then(tmp_path: Path) -> None:
    job = Job(events=tmp_path / EVENTS_FILE)
    nodes = [job.join(index) for index in range(2)]
    job.ready(*job.ranks)

    def step(number: int) -> None:
        for node in nodes:
            job.hear(node, Progress(number, number, number + 1, 0))

    step(1)
    job.coordinator._note_progress_at_s = 0.0
    step(2)
    step(3)
    notes = [event.fields["high_water"] for event in read_events(tmp_path) if event.stage == EventName.PROGRESS]
    assert notes == [2]
