"""Provide made-up runs and arbitrary logs, for tests of what is reported of them."""

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from checkpointless.cli import tables
from checkpointless.observability.report.summary import Job, Report, build_report
from checkpointless.observability.telemetry.event_names import STAGES
from checkpointless.observability.telemetry.events import Event
from tests.unit.made_up_run import MadeUpRun


def simple_run() -> tuple[MadeUpRun, float]:
    """Make up 100 s of a run: 10 s of start-up, and a fault at 31 s after step 21, where a step takes a second."""
    run = MadeUpRun()
    run.start(at_s=10)
    done_s = run.incident(31.0, "1", committed=21, spec="sigkill@optimizer:rank=1,step=22", how="SIGKILL")
    run.end(100.0, step=85)
    return run, done_s


def report_of(run: MadeUpRun, **more: Any) -> Report:
    return build_report("runs/1", run.events, **more)


def as_json(report: Report) -> str:
    return Job.of([report]).as_json()


def html_page(report: Report, tracebacks: Mapping[str, str]) -> str:
    return tables.html_page(Job.of([report]), [tracebacks])


_WITHIN = ("straggler", "saved", "corrupted")
_FIELDS = ("culprit", "how", "who", "seconds", "own_s", "usual_s", "on_node", "redone")
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
        stage=st.sampled_from(
            [*STAGES, "go", "respawn", "job", "trained", "progress", "rung", "fault_injected", *_WITHIN]
        ),
        edge=st.sampled_from(["begin", "end", "point"]),
        fields=st.dictionaries(
            st.sampled_from(
                ["cause", "target", "bytes", "sources", "error", "reason", "step", "high_water", "spec", *_FIELDS]
            ),
            st.none() | st.integers() | st.text(max_size=3) | st.lists(st.integers(0, 3), max_size=3),
        ),
    ),
    max_size=40,
)
HOSTILE = '<script>alert(1)</script> [red]\x1b[2J\x07\u202e & "quote" {{ 7 * 7 }}'
