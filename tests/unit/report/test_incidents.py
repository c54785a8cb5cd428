"""Test how incidents are summed up from events."""

import random
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.observability.report.incidents import IncidentSummary, Outcome, summarize
from checkpointless.observability.telemetry.event_names import STAGES, EventName
from checkpointless.observability.telemetry.events import Event
from tests.unit.made_up_run import UTC, MadeUpRun, S
from tests.unit.report.reports import LOGS

ENDING = ("abort", "finalize", "health", "barrier")
STARTING = STAGES[STAGES.index("enter") :]


def detect(run: MadeUpRun, at_s: float, incident: str, culprit: int | None) -> None:
    """Detect as the agent does: tell everybody at once, and name the cause a little later."""
    run.add(at_s, "notify", "begin", incident=incident)
    run.add(at_s + 0.001, "notify", "end", incident=incident)
    about: dict[str, Any] = {"cause": "RuntimeError: x", "culprit": culprit, "how": "exit"}
    run.add(at_s + 0.002, "detect", "point", incident=incident, **about)


def recovery(
    run: MadeUpRun, at_s: float, incident: str, lengths: Mapping[tuple[str, int], float] = MappingProxyType({})
) -> float:
    """Write all stages of each rank one after the other; return the second at which the last is done."""
    ends_s = []
    for rank in range(run.ranks):
        began_s = at_s
        for stage in (*ENDING, *STARTING):
            long_s = lengths.get((stage, rank), 0.001)
            fields: dict[str, Any] = {"incident": incident, "generation": run.generation + (stage in STARTING)}
            if stage == EventName.DECIDE:
                fields |= {"target": 7, "reason": ""}
            if stage == EventName.TRANSFER:
                fields |= {"bytes": 500, "sources": [0, 2] if rank == 1 else []}
            run.span(began_s, stage, rank, long_s, **fields)
            began_s += long_s
        ends_s.append(began_s)
    run.generation += 1
    return max(ends_s)


def one(run: MadeUpRun) -> IncidentSummary:
    (summary,) = summarize(run.events)
    return summary


def test_a_resumed_incident_from_fault_to_first_step() -> None:
    run = MadeUpRun(ranks=3, generation=3)
    injected = EventName.FAULT_INJECTED
    run.add(0.01, injected, "point", 0, generation=0, spec="an older generation's fault is none of it")
    run.add(0.02, injected, "point", 2, spec="another rank's fault is none of it")
    run.add(0.1, injected, "point", 1, spec="sigkill@forward:rank=1,step=8")
    detect(run, 0.13, "i1", culprit=1)
    run.add(0.135, "respawn", "point", 1, incident="i1")
    done_s = recovery(run, 0.14, "i1", {("rebuild", 2): 0.05, ("rebuild", 0): 0.03})
    summary = one(run)
    assert (summary.outcome, summary.incident, summary.generation, summary.culprit) == (Outcome.RESUMED, "i1", 3, 1)
    assert (summary.cause, summary.how, summary.start_ns) == ("RuntimeError: x", "exit", UTC + 0.1 * S)
    assert (summary.end_ns, summary.headline_s) == (UTC + round(done_s * S), pytest.approx(done_s - 0.1))
    assert (list(summary.stages_s), summary.stages_s["detect"]) == (list(STAGES), pytest.approx(0.030))
    assert (summary.stages_s["notify"], summary.stages_s["rebuild"]) == (pytest.approx(0.001), pytest.approx(0.050))
    assert (summary.target, summary.nbytes, summary.sources, summary.respawned) == (7, 500, (0, 2), (1,))


def test_a_step_that_is_another_one_is_an_outcome() -> None:
    run = MadeUpRun(ranks=3)
    detect(run, 0.1, "i1", culprit=1)
    recovery(run, 0.14, "i1")
    for rank in (2, 0):
        run.add(0.15, EventName.INEXACT, "point", rank, incident="i1", step=8, reason="step 8 has another loss")
    summary = one(run)
    assert (summary.outcome, summary.has_resumed) == (Outcome.INEXACT, True)
    assert (summary.inexact, summary.reason) == ("rank 2: step 8 has another loss", "")


def test_a_fault_during_recovery_takes_over() -> None:
    run = MadeUpRun()
    detect(run, 0, "i1", culprit=1)
    for rank in range(2):
        run.span(0.005, "abort", rank, incident="i1")
        run.span(0.010, "init", rank, incident="i1", generation=1)
    run.generation = 1
    for stage in ("datasets", "warm"):
        run.add(0.012, stage, "point", 0, incident="i1", kept=False, reason="another rank sets its data module up")
    detect(run, 0.02, "i2", culprit=0)
    recovery(run, 0.03, "i2")
    first, second = summarize(run.events)
    assert (first.incident, first.outcome, first.reason) == ("i1", Outcome.ESCALATED, "")
    assert (second.incident, second.outcome, second.generation) == ("i2", Outcome.RESUMED, 1)


def test_a_refused_recovery_says_why() -> None:
    run = MadeUpRun()
    detect(run, 0, "i1", culprit=1)
    run.span(0.01, "decide", 0, generation=1, incident="i1", target=None, reason="nobody holds shard 3")
    summary = one(run)
    assert (summary.outcome, summary.target, summary.reason) == (Outcome.FAILED, None, "nobody holds shard 3")


def test_the_last_detection_knows_best() -> None:
    run = MadeUpRun()
    run.add(0.09, EventName.FAULT_INJECTED, "point", 1, spec="exit@data:rank=1,step=1")
    about: dict[str, Any] = {"cause": "rank 0 lost its peer", "culprit": None, "how": "exception"}
    run.add(0.1, "detect", "point", incident="i1", **about)
    detect(run, 0.104, "i1", culprit=1)
    recovery(run, 0.12, "i1")
    summary = one(run)
    assert (summary.culprit, summary.how, summary.stages_s["detect"]) == (1, "exit", pytest.approx(0.010))


def test_a_block_that_records_no_stages_has_resumed_when_all_may_go_if_the_job_ends_well() -> None:
    run = MadeUpRun()
    detect(run, 0.01, "i1", culprit=1)
    run.span(0.012, "abort", 0, incident="i1")
    assert one(run).outcome is Outcome.FAILED
    run.generation = 1
    run.add(0.03, "go", "point", incident="i1")
    assert one(run).outcome is Outcome.FAILED  # nobody knows yet whether that helped
    run.end(0.09)
    assert (one(run).outcome, one(run).headline_s) == (Outcome.RESUMED, pytest.approx(0.020))


@pytest.mark.parametrize("label", [None, "i1"])
def test_a_rank_that_cleans_up_before_it_knows_the_incident_is_counted(label: str | None) -> None:
    run = MadeUpRun()
    detect(run, 0, "i1", culprit=1)
    recovery(run, 0.01, "i1")
    run.add(0.1, "abort", "begin", 0, incident=label)
    detect(run, 0.105, "i2", culprit=0)
    run.add(0.14, "abort", "end", 0, incident=label)
    recovery(run, 0.15, "i2")
    first, second = summarize(run.events)
    assert (first.stages_s["abort"], second.stages_s["abort"]) == (pytest.approx(0.001), pytest.approx(0.041))
    assert second.start_ns == UTC + 0.1 * S


@pytest.mark.parametrize(("code", "outcome"), [(0, Outcome.RESUMED), (1, Outcome.FAILED)])
def test_with_no_step_left_to_make_the_end_of_the_job_decides(code: int, outcome: Outcome) -> None:
    run = MadeUpRun()
    detect(run, 0, "i1", culprit=1)
    run.generation = 1
    for rank in range(2):
        run.span(0.01, "init", rank, 0.001, incident="i1")
    run.add(0.05, "job", "end", code=code, reason=["too many incidents", "traceback"])
    summary = one(run)
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
    run = MadeUpRun(ranks, generation=generation)
    detect(run, 0, "i1", culprit=0)
    done_s = recovery(run, 0.002, "i1", lengths)
    summary = one(run)
    assert (summary.outcome, summary.headline_s) == (Outcome.RESUMED, pytest.approx(done_s))
    for stage in (*ENDING, *STARTING):
        assert summary.stages_s[stage] == pytest.approx(
            max(lengths.get((stage, rank), 0.001) for rank in range(ranks))
        )
    # the lines of one process stay in order, those of different processes mix
    places = {event.pid: rng.random() for event in run.events}
    assert summarize(sorted(run.events, key=lambda event: (places[event.pid], event.ts))) == [summary]


@given(LOGS)
def test_any_log_has_a_summary_of_every_incident(events: list[Event]) -> None:
    summaries = summarize(events)
    ids = [summary.incident for summary in summaries]
    assert len(ids) == len(set(ids))
    assert set(ids) >= {event.incident for event in events if event.incident and event.stage == EventName.DETECT}
    for summary in summaries:
        assert (summary.outcome is Outcome.RESUMED) == (summary.headline_s is not None)
        assert all(seconds >= 0 for seconds in summary.stages_s.values())
