"""Test that a slow rank is named, and what about it is slow, while training goes on."""

import json

import pytest

from checkpointless.observability.report.summary import build_report
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import read_events
from tests.ranks.agent_job import SCRIPTS
from tests.ranks.jobs import Attempt, Job
from tests.unit.report.reports import as_json

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]
SCRIPT = str(SCRIPTS / "paced.py")


def _train(attempt: Attempt, way: str, steps: int = 60, nproc: int = 4, *faults: str) -> Job:
    job = attempt(nproc, args=(str(steps), way), faults=faults, code=None)  # one is not to come as often as it may
    assert job.code == 0, job.story()
    assert job.incidents == []
    ends = [event.fields["step"] for event in job.events(EventName.TRAINED)]
    assert ends == [steps] * nproc  # so that the report knows what follows the training
    return job


def _found(job: Job) -> list[tuple[int, str]]:
    report = build_report(str(job.run_dir), read_events(job.run_dir))
    assert json.loads(as_json(report))["stragglers"] == [
        {key: value for key, value in vars(each).items() if key != "begin_ns"} for each in report.stragglers
    ]
    for each in report.stragglers:
        assert any(line.startswith(f"rank {each.rank} on node 0 is slow") for line in job.said)
    return [(each.rank, each.why) for each in report.stragglers]


@pytest.mark.long
def test_a_rank_that_waits_for_its_batches(attempt: Attempt) -> None:
    assert _found(_train(attempt, "data", 40)) == [(1, "data")]


def test_a_throttled_process(attempt: Attempt) -> None:
    assert _found(_train(attempt, "throttled", 40, 2)) == [(1, "compute")]


def test_the_fault_kind_slow(attempt: Attempt) -> None:
    fault = "slow@between:rank=3,prob=1,seconds=0.2,times=1000"
    assert _found(_train(attempt, "even", 40, 4, fault)) == [(3, "compute")]


@pytest.mark.long
def test_it_is_told_once_and_is_over_when_the_rank_is_as_fast_as_others(attempt: Attempt) -> None:
    job = _train(attempt, "later", 110)
    (found,) = build_report(str(job.run_dir), read_events(job.run_dir)).stragglers
    assert (found.rank, found.why) == (2, "compute")
    assert found.step is not None
    assert found.step >= 30
    assert found.lasted_s is not None


@pytest.mark.long  # unit/coordinator/test_stragglers.py has the rule
def test_uneven_work_of_several_roles_is_not_slow(attempt: Attempt) -> None:
    assert _found(_train(attempt, "uneven")) == []
