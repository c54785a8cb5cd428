"""Test the forms of a report: JSON, a page, a trace; any log has them."""

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given

from checkpointless.observability.report.incidents import Outcome
from checkpointless.observability.report.summary import RunState, build_report
from checkpointless.observability.report.trace import write_trace
from checkpointless.observability.telemetry.events import Event
from tests.drawn import examples
from tests.unit.made_up_run import MadeUpRun
from tests.unit.report.reports import HOSTILE, LOGS, as_json, html_page, report_of, simple_run


def test_what_no_event_says_is_unknown() -> None:
    run = MadeUpRun()
    run.start()
    run.incident(31.0, "1", committed=21, resumed=15)
    report = report_of(run)
    assert (report.steps_lost, report.run.state) == (6, RunState.OPEN)
    plain = MadeUpRun()  # its block is no training loop that we know
    plain.add(0, "job", "begin")
    plain.add(2, "go", "point", high_water=-1)
    plain.add(5, "detect", "point", incident="1", cause="x", culprit=0, how="exit")
    plain.generation = 1
    plain.add(6, "go", "point", incident="1", high_water=-1)
    plain.add(9, "job", "end", code=0, reason=[])
    report = report_of(plain)
    assert (report.incidents[0].outcome, report.steps_lost, report.run.step_s) == (Outcome.RESUMED, None, None)
    assert report.goodput is not None
    assert (report.goodput.seconds["startup"], report.goodput.incidents_s, report.goodput.ettr) == (2.0, 1.0, None)


def test_json_says_what_the_report_says() -> None:
    run, _ = simple_run()
    report = report_of(run, caused={"sigkill@optimizer:rank=1,step=22": 1}, lines_left_out=2)
    document = json.loads(as_json(report))
    assert (document["run"]["state"], document["run"]["begin"]) == ("succeeded", "2023-11-14T22:13:20.000Z")
    assert document["run"]["lines_left_out"] == 2
    (incident,) = document["incidents"]
    assert incident["kind"] == "sigkill"
    assert (incident["rung"], incident["outcome"], incident["steps_lost"]) == ("in-process", "resumed", 0)
    assert (incident["nbytes"], incident["sources"]) == (1_500_000, [0])
    assert sum(incident["tiles_s"].values()) == pytest.approx(incident["headline_s"])
    assert document["outcomes"] == {"resumed": 1, "resumed, not exact": 0, "escalated": 0, "failed": 0}
    periods = document["time"]["periods"]
    assert sum(period["seconds"] for period in periods) == document["goodput"]["wall_s"] == 100.0


def test_failed_device_checks_and_saves_are_shown_everywhere_and_in_order() -> None:
    run = MadeUpRun()
    run.start()
    assert not any(title in html_page(report_of(run), {}) for title in ("device checks", "not saved"))
    for at_s, remedy in ((31.1, "try"), (35.1, "give_up")):
        why = "the device check exited with 1: <b>"
        run.add(at_s, "bad_device", "point", rank=1, node_number=0, why=why, remedy=remedy)
    run.add(31.0, "save_failed", "point", rank=0, path="/ckpt/step=5", reason="no mount", ranks=[0, 1])
    run.add(20.0, "save_failed", "point", rank=1, path="/ckpt/step=3", reason="disk <full>", ranks=[1])
    report = report_of(run)
    found = json.loads(as_json(report))
    devices = [(each["node"], each["rank"], each["remedy"]) for each in found["devices"]]
    assert devices == [("0", 1, "try"), ("0", 1, "give_up")]
    assert found["failed_saves"] == [
        {"path": "/ckpt/step=3", "reason": "disk <full>", "ranks": [1]},
        {"path": "/ckpt/step=5", "reason": "no mount", "ranks": [0, 1]},
    ]
    page = html_page(report, {})
    for shown in ("the device check exited with 1: &lt;b&gt;", "give_up", "disk &lt;full&gt;", "/ckpt/step=5"):
        assert shown in page


KNOWN = {"html", "head", "meta", "style", "body", "pre", "code", "span"}


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.words = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in KNOWN
        assert {name for name, _ in attrs} <= {"charset", "class", "style"}

    def handle_data(self, data: str) -> None:
        self.words += data


def page_of(events: list[Event], tracebacks: dict[str, str] | None = None, **more: Any) -> str:
    return html_page(build_report("runs/1", events, **more), tracebacks or {})


def check_page(text: str) -> Page:
    assert not re.search(r"url\(|@import|https?://", text)
    assert text.rstrip().endswith("</html>")
    text.encode()
    return Page(text)


def test_all_of_a_report_is_on_the_page() -> None:
    run = MadeUpRun(ranks=4)
    run.start()
    run.incident(31.0, "1", committed=21, spec="sigkill@optimizer:rank=1,step=22")
    run.incident(50.0, "2", committed=30, resumed=25)
    run.end(60.0, step=40)
    page = check_page(page_of(run.events, caused={"sigkill@optimizer:rank=1,step=22": 1}))
    for said in ("ETTR", "sigkill", "finished steps lost: 5", "rank 0: 1.5", "injected"):
        assert said in page.words


def test_what_comes_from_a_run_is_text() -> None:
    run = MadeUpRun()
    run.start()
    run.incident(31.0, "1", committed=21, cause=HOSTILE, how=HOSTILE, spec=f"{HOSTILE}@x")
    run.incident(50.0, "2", committed=30, until="decide", cause=HOSTILE)
    run.add(52.0, "fallback", "point", 0, incident="2", reason=HOSTILE)
    run.end(60.0, code=1, reason=HOSTILE)
    text = page_of(run.events, caused={HOSTILE: 1}, tracebacks={"1": f"Traceback:\n  here\n{HOSTILE}"})
    page = check_page(text)
    assert "<script" not in text
    assert "\n  here\n" in page.words
    assert "{{ 7 * 7 }}" in page.words
    assert not {"\x1b", "\x07", "\u202e"} & set(text)


METADATA = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}
NESTING_SLACK_US = 0.002  # times are rounded to the nanosecond


def trace_of(events: Sequence[Event]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(write_trace(build_report("runs/1", events), events))
    check_trace(document)
    return document


def check_trace(document: dict[str, Any]) -> None:
    """Check that metadata is first and complete, times are sorted, spans nest, and asynchronous ones match."""
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    events = document["traceEvents"]
    phases = [event["ph"] for event in events]
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    processes = {event["pid"] for event in events if event["name"] == "process_name"}
    assert "M" not in phases[phases.count("M") :]
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    assert not times or times[0] >= 0
    around: dict[tuple[int, int], list[float]] = defaultdict(list)
    open_spans: set[tuple[str, str]] = set()
    for event in events:
        assert {"name", "ph", "pid", "tid", "args"} <= event.keys()
        assert (type(event["pid"]), type(event["tid"])) == (int, int)
        if event["ph"] == "M":
            assert event["name"] in METADATA
            continue
        thread = event["pid"], event["tid"]
        assert thread in named
        assert event["pid"] in processes
        if event["ph"] == "X":
            assert event["dur"] >= 0
            stack = around[thread]
            while stack and stack[-1] <= event["ts"] + NESTING_SLACK_US:
                stack.pop()
            assert not stack or event["ts"] + event["dur"] <= stack[-1] + NESTING_SLACK_US
            stack.append(event["ts"] + event["dur"])
        elif event["ph"] == "i":
            assert event["s"] == "t"
        elif event["ph"] == "b":
            open_spans.add((event["cat"], event["id2"]["local"]))
        else:
            assert event["ph"] == "e"
            open_spans.remove((event["cat"], event["id2"]["local"]))
    assert not open_spans


def test_ranks_agents_and_the_job_each_have_their_line() -> None:
    run = MadeUpRun(ranks=4, per_node=2)
    run.start()
    run.incident(31.0, "1", committed=21, spec="sigkill@optimizer:rank=1,step=22")
    run.end(60.0, step=40)
    events = trace_of(run.events)["traceEvents"]
    names = {(event["pid"], event["args"]["name"]) for event in events if event["name"] == "thread_name"}
    job, first, second = sorted({pid for pid, _ in names})
    assert names >= {(job, "run"), (job, "incidents"), (first, "agent"), (first, "rank 1"), (second, "rank 2")}
    spans = [event for event in events if event["ph"] == "X"]
    rank_1 = [event for event in spans if event["args"].get("os_pid") == 1001]
    transfer = next(event for event in rank_1 if event["name"] == "transfer")
    assert transfer["args"]["bytes"] == 1_500_000
    assert transfer["dur"] == 100_000  # a tenth of a second in microseconds
    (incident,) = [event for event in spans if event["name"].startswith("#1")]
    assert (incident["ts"], incident["args"]["resumed_after_step"]) == (31_000_000, 21)


def test_a_stage_that_never_ended_lasts_until_the_next_thing_that_is_known() -> None:
    run = MadeUpRun(ranks=1)
    run.start()
    run.add(31.0, "init", "begin", 0, incident="1")
    run.add(31.7, "barrier", "begin", 0, incident="1")
    run.add(32.0, "barrier", "end", 0, incident="1")
    (init,) = [event for event in trace_of(run.events)["traceEvents"] if event["name"] == "init"]
    assert (init["dur"], init["args"]["unfinished"]) == (700_000, True)


@examples(50)
@given(LOGS)
def test_any_log_has_a_report_a_page_and_a_trace_that_follows_the_rules(events: list[Event]) -> None:
    document = json.loads(as_json(build_report("x", events)))
    assert document["format"] == 2
    goodput = document["goodput"]
    assert (goodput is None) == (not events)
    assert goodput is None or goodput["ettr"] is None or 0 <= goodput["ettr"] <= 1
    check_page(page_of(events))
    trace_of(events)


def test_the_page_is_the_same_whatever_the_terminal_is(monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_of(simple_run()[0])
    page = html_page(report, {})
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    assert html_page(report, {}) == page
