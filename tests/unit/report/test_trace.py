"""The trace follows the rules of the trace-event format, so that viewers show all of it."""

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from hypothesis import given

from checkpointless.observability.report.summary import build_report
from checkpointless.observability.report.trace import write_trace
from checkpointless.observability.telemetry.events import Event
from tests.drawn import examples
from tests.unit.made_up_run import MadeUpRun
from tests.unit.report.reports import LOGS

METADATA = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}
NESTING_SLACK_US = 0.002  # times are rounded to the nanosecond


def trace_of(events: Sequence[Event]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(write_trace(build_report("runs/1", events), events))
    return document


def check(document: dict[str, Any]) -> None:
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
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
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
    document = trace_of(run.events)
    check(document)
    names = {
        (event["pid"], event["args"]["name"]) for event in document["traceEvents"] if event["name"] == "thread_name"
    }
    job, first, second = sorted({pid for pid, _ in names})
    assert names >= {(job, "run"), (job, "incidents"), (first, "agent"), (first, "rank 1"), (second, "rank 2")}
    spans = [event for event in document["traceEvents"] if event["ph"] == "X"]
    rank_1 = [event for event in spans if event["args"].get("os_pid") == 1001]
    transfer = next(event for event in rank_1 if event["name"] == "transfer")
    assert transfer["args"]["bytes"] == 1_500_000
    assert transfer["dur"] == 100_000  # a tenth of a second in microseconds
    (incident,) = [event for event in spans if event["name"].startswith("#1")]
    assert incident["ts"] == 31_000_000
    assert incident["args"]["resumed_after_step"] == 21


def test_a_stage_that_never_ended_lasts_until_the_next_thing_that_is_known() -> None:
    run = MadeUpRun(ranks=1)
    run.start()
    run.add(31.0, "init", "begin", 0, incident="1")
    run.add(31.7, "barrier", "begin", 0, incident="1")
    run.add(32.0, "barrier", "end", 0, incident="1")
    document = trace_of(run.events)
    check(document)
    (init,) = [event for event in document["traceEvents"] if event["name"] == "init"]
    assert init["dur"] == 700_000
    assert init["args"]["unfinished"] is True


@examples(50)
@given(LOGS)
def test_any_log_makes_a_trace_that_follows_the_rules(events: list[Event]) -> None:
    check(trace_of(events))
