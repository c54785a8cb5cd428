"""Test how incidents are summed up from events."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.observability.report.incidents import IncidentSummary, Outcome, summarize
from checkpointless.observability.telemetry.event_names import STAGES, EventName
from checkpointless.observability.telemetry.events import Edge, Event
from tests.unit.report.reports import LOGS

MS = 1_000_000
UTC = 1_700_000_000_000_000_000  # nothing may depend on where a clock begins
ENDING = ("abort", "finalize", "health", "barrier")
STARTING = STAGES[STAGES.index("enter") :]


class Script:
    """Writes events at chosen milliseconds."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(
        self,
        ms: float,
        stage: str,
        edge: Edge,
        rank: int | None,
        generation: int,
        incident: str | None,
        **fields: Any,
    ) -> None:
        ns = int(ms * MS)
        pid = 100 if rank is None else 1000 + rank
        self.events.append(Event(UTC + ns, ns, 0, rank, pid, generation, incident, stage, edge, fields))

    def span(
        self, ms: float, long_ms: float, stage: str, rank: int, generation: int, incident: str, **fields: Any
    ) -> None:
        self.add(ms, stage, "begin", rank, generation, incident)
        self.add(ms + long_ms, stage, "end", rank, generation, incident, **fields)

    def detect(self, ms: float, generation: int, incident: str, culprit: int | None) -> None:
        """Detect as the agent does: tell everybody at once, and name the cause a little later."""
        self.add(ms, "notify", "begin", None, generation, incident)
        self.add(ms + 1, "notify", "end", None, generation, incident)
        self.add(
            ms + 2,
            "detect",
            "point",
            None,
            generation,
            incident,
            cause="RuntimeError: x",
            culprit=culprit,
            how="exit",
        )

    def recovery(
        self, ms: float, generation: int, incident: str, ranks: int, lengths: dict[tuple[str, int], float]
    ) -> float:
        """Write all stages of each rank one after the other; return the millisecond at which the last is done."""
        done = ms
        for rank in range(ranks):
            at = ms
            for stage in (*ENDING, *STARTING):
                long_ms = lengths.get((stage, rank), 1.0)
                fields: dict[str, Any] = {}
                if stage == EventName.DECIDE:
                    fields = {"target": 7, "reason": ""}
                if stage == EventName.TRANSFER:
                    fields = {"bytes": 500, "sources": [0, 2] if rank == 1 else []}
                new = stage in STARTING
                self.span(at, long_ms, stage, rank, generation + new, incident, **fields)
                at += long_ms
            done = max(done, at)
        return done


def one(script: Script) -> IncidentSummary:
    (summary,) = summarize(script.events)
    return summary


def test_a_resumed_incident_from_fault_to_first_step() -> None:
    script = Script()
    script.add(10, EventName.FAULT_INJECTED, "point", 0, 0, None, spec="an older generation's fault is none of it")
    script.add(20, EventName.FAULT_INJECTED, "point", 2, 3, None, spec="another rank's fault is none of it")
    script.add(100, EventName.FAULT_INJECTED, "point", 1, 3, None, spec="sigkill@forward:rank=1,step=8")
    script.detect(130, 3, "i1", culprit=1)
    script.add(135, "respawn", "point", 1, 3, "i1")
    done = script.recovery(140, 3, "i1", ranks=3, lengths={("rebuild", 2): 50.0, ("rebuild", 0): 30.0})
    summary = one(script)
    assert summary.outcome is Outcome.RESUMED
    assert (summary.incident, summary.generation, summary.culprit) == ("i1", 3, 1)
    assert (summary.cause, summary.how) == ("RuntimeError: x", "exit")
    assert summary.start_ns == UTC + 100 * MS
    assert summary.end_ns == UTC + int(done * MS)
    assert summary.headline_s == pytest.approx((done - 100) / 1000)
    assert list(summary.stages_s) == list(STAGES)
    assert summary.stages_s["detect"] == pytest.approx(0.030)
    assert summary.stages_s["notify"] == pytest.approx(0.001)
    assert summary.stages_s["rebuild"] == pytest.approx(0.050)
    assert (summary.target, summary.nbytes, summary.sources, summary.respawned) == (7, 500, (0, 2), (1,))


def test_a_step_that_is_another_one_is_an_outcome() -> None:
    script = Script()
    script.detect(100, 3, "i1", culprit=1)
    script.recovery(140, 3, "i1", ranks=3, lengths={})
    for rank in (2, 0):
        script.add(150, EventName.INEXACT, "point", rank, 4, "i1", step=8, reason="step 8 has another loss")
    summary = one(script)
    assert (summary.outcome, summary.has_resumed) == (Outcome.INEXACT, True)
    assert (summary.inexact, summary.reason) == ("rank 2: step 8 has another loss", "")


def test_a_fault_during_recovery_takes_over() -> None:
    script = Script()
    script.detect(0, 0, "i1", culprit=1)
    for rank in range(2):
        script.span(5 + rank, 1, "abort", rank, 0, "i1")
        script.span(10 + rank, 1, "init", rank, 1, "i1")
    script.add(12, "datasets", "point", 0, 1, "i1", kept=False, reason="another rank sets its data module up")
    script.add(13, "warm", "point", 0, 1, "i1", kept=False, reason="nothing was kept")
    script.detect(20, 1, "i2", culprit=0)
    script.recovery(30, 1, "i2", ranks=2, lengths={})
    first, second = summarize(script.events)
    assert (first.incident, first.outcome, first.reason) == ("i1", Outcome.ESCALATED, "")
    assert (second.incident, second.outcome, second.generation) == ("i2", Outcome.RESUMED, 1)


def test_a_refused_recovery_says_why() -> None:
    script = Script()
    script.detect(0, 0, "i1", culprit=1)
    script.span(10, 1, "decide", 0, 1, "i1", target=None, reason="nobody holds shard 3")
    summary = one(script)
    assert (summary.outcome, summary.target, summary.reason) == (Outcome.FAILED, None, "nobody holds shard 3")


def test_the_last_detection_knows_best() -> None:
    script = Script()
    script.add(90, EventName.FAULT_INJECTED, "point", 1, 0, None, spec="exit@data:rank=1,step=1")
    script.add(100, "detect", "point", None, 0, "i1", cause="rank 0 lost its peer", culprit=None, how="exception")
    script.detect(104, 0, "i1", culprit=1)
    script.recovery(120, 0, "i1", ranks=2, lengths={})
    summary = one(script)
    assert (summary.culprit, summary.how) == (1, "exit")
    assert summary.stages_s["detect"] == pytest.approx(0.010)


def test_a_block_that_records_no_stages_has_resumed_when_all_may_go_if_the_job_ends_well() -> None:
    script = Script()
    script.detect(10, 0, "i1", culprit=1)
    script.span(12, 5, "abort", 0, 0, "i1")
    assert one(script).outcome is Outcome.FAILED
    script.add(30, "go", "point", None, 1, "i1")
    assert one(script).outcome is Outcome.FAILED  # nobody knows yet whether that helped
    script.add(90, "job", "end", None, 1, None, code=0)
    assert one(script).outcome is Outcome.RESUMED
    assert one(script).headline_s == pytest.approx(0.020)


@pytest.mark.parametrize("label", [None, "i1"])
def test_a_rank_that_cleans_up_before_it_knows_the_incident_is_counted(label: str | None) -> None:
    script = Script()
    script.detect(0, 0, "i1", culprit=1)
    script.recovery(10, 0, "i1", ranks=2, lengths={})
    script.add(100, "abort", "begin", 0, 1, label)
    script.detect(105, 1, "i2", culprit=0)
    script.add(140, "abort", "end", 0, 1, label)
    script.recovery(150, 1, "i2", ranks=2, lengths={})
    first, second = summarize(script.events)
    assert first.stages_s["abort"] == pytest.approx(0.001)
    assert second.stages_s["abort"] == pytest.approx(0.041)
    assert second.start_ns == UTC + 100 * MS


@pytest.mark.parametrize(("code", "outcome"), [(0, Outcome.RESUMED), (1, Outcome.FAILED)])
def test_with_no_step_left_to_make_the_end_of_the_job_decides(code: int, outcome: Outcome) -> None:
    script = Script()
    script.detect(0, 0, "i1", culprit=1)
    script.span(10, 1, "init", 0, 1, "i1")
    script.span(10, 1, "init", 1, 1, "i1")
    script.add(50, "job", "end", None, 1, None, code=code, reason=["too many incidents", "traceback"])
    summary = one(script)
    assert summary.outcome is outcome
    assert summary.headline_s == (pytest.approx(0.011) if code == 0 else None)
    assert summary.reason == ("" if code == 0 else "too many incidents")


@given(
    st.integers(1, 6),
    st.integers(0, 5),
    st.dictionaries(
        st.tuples(st.sampled_from([*ENDING, *STARTING]), st.integers(0, 5)), st.integers(0, 5000).map(float)
    ),
    st.randoms(use_true_random=False),
)
def test_every_stage_is_its_slowest_rank_in_whatever_order_lines_come(
    ranks: int, generation: int, lengths: dict[tuple[str, int], float], rng: random.Random
) -> None:
    script = Script()
    script.detect(0, generation, "i1", culprit=0)
    done = script.recovery(2, generation, "i1", ranks, lengths)
    summary = one(script)
    assert summary.outcome is Outcome.RESUMED
    assert summary.headline_s == pytest.approx(done / 1000)
    for stage in (*ENDING, *STARTING):
        slowest_ms = max(lengths.get((stage, rank), 1.0) for rank in range(ranks))
        assert summary.stages_s[stage] == pytest.approx(slowest_ms / 1000)
    # the lines of one process stay in order, those of different processes mix
    places = {event.pid: rng.random() for event in script.events}
    assert summarize(sorted(script.events, key=lambda event: (places[event.pid], event.ts))) == [summary]


@given(LOGS)
def test_any_log_has_a_summary_of_every_incident(events: list[Event]) -> None:
    summaries = summarize(events)
    ids = [summary.incident for summary in summaries]
    assert len(ids) == len(set(ids))
    assert set(ids) >= {event.incident for event in events if event.incident and event.stage == EventName.DETECT}
    for summary in summaries:
        assert (summary.outcome is Outcome.RESUMED) == (summary.headline_s is not None)
        assert all(seconds >= 0 for seconds in summary.stages_s.values())
