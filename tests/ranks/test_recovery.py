"""Test faults at every phase of a real NeMo job: the bits of every step are those of an undisturbed run."""

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from checkpointless.faults.ledger import fired
from checkpointless.observability.report.incidents import Outcome
from checkpointless.observability.report.summary import RunState, build_report
from checkpointless.observability.report.trace import write_trace
from checkpointless.observability.report.verify import Steps
from checkpointless.observability.telemetry.event_names import Rung
from checkpointless.observability.telemetry.events import read_events
from tests.ranks.jobs import Attempt, Disturb, Job, faults_in, require_nothing_left, small
from tests.ranks.layouts import DROPOUT, EP2, PP2, RESUME, TP2, with_checkpoints
from tests.unit.report.reports import html_page
from tests.unit.report.test_forms import check_page, check_trace

pytestmark = [pytest.mark.ranks, pytest.mark.nemo, pytest.mark.timeout(400)]


def check_fallback_report(job: Job) -> None:
    """Check that the report is right about a job of 7 steps that went back from step 4 to step 3."""
    events = read_events(job.run_dir)
    report = build_report("runs/1", events)

    first, second = report.incidents
    assert (first.outcome, second.outcome, second.rung) == (Outcome.ESCALATED, Outcome.RESUMED, Rung.JOB)
    assert (second.committed, second.resumed_after) == (4, 3)
    assert report.steps_lost == 1
    assert report.kinds == {"sigkill": 2}
    assert (report.run.state, report.run.last_step, report.run.nproc) == (RunState.SUCCEEDED, 7, 4)
    assert sum(second.tiles_s.values()) == pytest.approx(second.headline_s, abs=0.002)

    goodput = report.goodput
    assert goodput is not None
    assert goodput.seconds["repeated"] == pytest.approx(report.run.step_s)
    assert goodput.ettr is not None
    assert 0 < goodput.ettr < 1
    assert min(goodput.seconds["startup"], goodput.incidents_s, goodput.seconds["shutdown"]) > 0

    check_trace(json.loads(write_trace(report, events)))
    check_page(html_page(report, {}))


DEATHS = ("exit", "segfault", "abort")
HANGS = ("hang", "gil", "sigstop")
PHASES = ("data", "forward", "backward", "sync", "before_optimizer", "optimizer", "after_optimizer", "between")


@pytest.mark.parametrize("kind", ["exception", "sigkill"])
def test_every_phase(disturb: Disturb, kind: str) -> None:
    """Every second step of one job has a fault, each in another phase."""
    job = disturb(4, 2 * len(PHASES) + 2, *faults_in(PHASES, kind, 4), args=(*TP2, *DROPOUT))
    for incident, step, phase in zip(job.incidents, count(2, 2), PHASES):
        assert incident.outcome is Outcome.RESUMED, phase
        assert incident.respawned == ((step // 2 % 4,) if kind == "sigkill" else ()), phase
        if phase in ("data", "forward", "backward", "sync", "before_optimizer"):
            assert incident.target == step - 1, phase
        if phase in ("after_optimizer", "between"):
            assert incident.target == step, phase


@pytest.mark.long  # per commit test_every_phase has TP2, test_megatron_loop.py stages, and test_recipes.py experts
@pytest.mark.parametrize(
    ("nproc", "args", "faults"),
    [
        (4, (*PP2, *DROPOUT), ("sigkill@backward:rank=3,step=3",)),
        (4, EP2, ("sigkill@forward:rank=1,step=2", "exception@optimizer:rank=2,step=4")),
        (8, (*TP2, *PP2, *DROPOUT), ("sigkill@forward:rank=5,step=2", "exception@optimizer:rank=0,step=4")),
        (8, (), ("sigkill@data:rank=0,step=3",)),
    ],
    ids=["pp2", "ep2", "tp2-pp2", "dp8"],
)
def test_every_layout(disturb: Disturb, nproc: int, args: tuple[str, ...], faults: tuple[str, ...]) -> None:
    disturb(nproc, 5, *faults, args=args)


def test_other_deaths_and_a_fault_after_the_last_step_was_committed(disturb: Disturb) -> None:
    faults = [f"{kind}@backward:rank={at % 2},step={2 * at}" for at, kind in enumerate(DEATHS, start=1)]
    job = disturb(2, 14, *faults, "exception@after_optimizer:rank=1,step=14")
    assert [incident.respawned for incident in job.incidents] == [(1,), (0,), (1,), ()]
    assert job.incidents[-1].target == 14


@pytest.mark.parametrize("kinds", [HANGS[:2], pytest.param(HANGS, marks=pytest.mark.long)], ids=["hang-gil", "all"])
def test_a_hanging_rank_is_replaced_and_its_victims_are_not(disturb: Disturb, kinds: tuple[str, ...]) -> None:
    """Per commit test_agent_incidents.py stops a rank."""
    faults = [f"{kind}@forward:rank={rank},step={1 + 2 * rank}" for rank, kind in enumerate(kinds, start=1)]
    job = disturb(4, 2 + 2 * len(kinds), *faults, heartbeat_timeout_s=4.0)
    replaced = [(incident.culprit, incident.respawned) for incident in job.incidents]
    assert replaced == [(rank, (rank,)) for rank in range(1, 1 + len(kinds))]


@pytest.mark.parametrize("kind", [pytest.param("exception", marks=pytest.mark.long), "sigkill"])
def test_a_fault_while_the_last_one_is_handled(disturb: Disturb, kind: str) -> None:
    handled = (
        "sigkill@between:rank=0,step=2",
        *(f"{kind}@{phase}:rank=1,step=2" for phase in ("init", "recovery")),
    )
    job = disturb(4, 6, f"{kind}@forward:rank=3,step=1", *handled)
    assert job.incidents[0].resumed_after == 0  # this holds whether or not all ranks had their state by then
    assert len(job.incidents) == 4
    assert job.incidents[-1].outcome is Outcome.RESUMED
    assert job.incidents[-1].target == 2


def test_a_users_own_bug_ends_the_job(attempt: Attempt) -> None:
    fault = "exception@forward:rank=1,step=2,times=9"
    job = attempt(2, args=small(2, 4), faults=(fault,), code=1)
    assert fired(job.run_dir) == {fault: 3}
    last_words = "\n".join(job.said)
    assert "3 times" in last_words
    assert "Traceback" in last_words
    assert "InjectedFault" in last_words


def test_both_holders_gone_and_no_checkpoint_fails_with_the_reason(attempt: Attempt) -> None:
    # Rank 2 dies before it can give what it holds.
    faults = ("sigkill@forward:rank=0,step=3", "sigkill@recovery:rank=2,step=2")
    job = attempt(4, args=small(4, 4), faults=faults, code=1)
    assert "no living rank holds the shard of ranks 0, 2" in job.said[-1]
    assert "no checkpoint" in job.said[-1]
    assert max(record.step for record in job.steps[1]) == 2, "never a silent restart at step 0"


def test_both_holders_gone_falls_back_to_the_checkpoint(
    attempt: Attempt, undisturbed: Callable[..., Steps], tmp_path: Path
) -> None:
    # Rank 2 dies before it can give what it holds.
    faults = ("sigkill@forward:rank=0,step=5", "sigkill@recovery:rank=2,step=4")
    args = (*small(4, 7), *with_checkpoints(tmp_path / "nemo"), RESUME)
    # A checkpoint can take long on a busy disk.
    job = attempt(4, args=args, faults=faults, heartbeat_timeout_s=60.0)
    job.assert_done_again(undisturbed(4, small(4, 7)), again={4})  # it went on from the checkpoint after step 3
    check_fallback_report(job)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("incidents", "nproc", "layout"), [(4, 2, ()), pytest.param(20, 4, TP2, marks=pytest.mark.long)], ids=[4, 20]
)
def test_after_many_incidents_nothing_is_left_behind(
    disturb: Disturb, incidents: int, nproc: int, layout: tuple[str, ...]
) -> None:
    steps = range(2, 2 + 3 * incidents, 3)  # a rank says what it holds after two steps; one more follows
    # After a fault whose step is not made again comes one to which all ranks have come: they have said it by then.
    phases = (*PHASES[:4], "optimizer", "before_optimizer", "after_optimizer", "before_optimizer")
    faults = [
        f"exception@{phases[index % len(phases)]}:rank={index % nproc},step={step}"
        for index, step in enumerate(steps)
    ]
    job = disturb(nproc, steps[-1] + 3, *faults, args=layout, limit_s=180.0)
    for rank in range(nproc):
        require_nothing_left(job, rank, incidents)
