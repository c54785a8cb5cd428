"""Test kinds of fault that a process reports, survives or leaves with, and what follows each in a real NeMo job."""

import pytest

from checkpointless.faults.ledger import fired
from checkpointless.observability.report.incidents import Outcome
from tests.ranks.jobs import Attempt, Disturb, small
from tests.ranks.layouts import DROPOUT
from tests.ranks.test_worker_streams import NOISY

pytestmark = [pytest.mark.ranks, pytest.mark.nemo, pytest.mark.timeout(400)]


def test_sigterm_and_memory_that_runs_out(disturb: Disturb) -> None:
    """Who gets SIGTERM finishes the step and is replaced; who has no memory goes on in place."""
    terms = ("forward:rank=1,step=3", "optimizer:rank=0,step=6", "forward:rank=1,step=14")
    ooms = ("data:rank=1,step=8", "backward:rank=1,step=10", "after_optimizer:rank=1,step=12")
    faults = [*(f"sigterm@{place}" for place in terms), *(f"oom@{place}" for place in ooms)]
    job = disturb(2, 14, *faults, args=DROPOUT)
    assert [incident.outcome for incident in job.incidents] == [Outcome.RESUMED] * 6
    assert [incident.respawned for incident in job.incidents] == [(1,), (0,), (), (), (), (1,)]
    assert [incident.target for incident in job.incidents] == [3, 6, 7, 9, 12, 14]
    assert [incident.culprit for incident in job.incidents[2:5]] == [1, 1, 1]
    said = "\n".join(job.said)
    assert said.count("exited with code 0") == said.count("can't allocate memory") == 3


@pytest.mark.long
@pytest.mark.parametrize("phase", ["init", "recovery"])
def test_sigterm_before_lightning_listens_kills(disturb: Disturb, phase: str) -> None:
    faults = ("exception@forward:rank=0,step=3", f"sigterm@{phase}:rank=1,step=2")
    job = disturb(2, 4, *faults, args=DROPOUT)
    assert job.incidents[-1].outcome is Outcome.RESUMED
    assert "rank 1 killed by SIGTERM" in "\n".join(job.said)


def test_workers_fail_after_a_recovery_too_and_at_the_last_step(disturb: Disturb) -> None:
    """What torch set up once per process, to hear of the death of workers, is there in later generations, too."""
    faults = (
        "dataloader@data:rank=1,step=2",
        "dataloader@data:rank=1,step=3,how=kill",
        "dataloader@data:rank=0,step=4,how=kill",
        "dataloader@data:rank=1,step=5,how=raise",
    )
    job = disturb(2, 5, *faults, args=(*NOISY, *DROPOUT))
    assert [incident.culprit for incident in job.incidents] == [1, 1, 0, 1]
    assert [incident.respawned for incident in job.incidents] == [()] * 4
    assert [incident.target for incident in job.incidents] == [1, 2, 3, 4]
    said = "\n".join(job.said)
    assert said.count("is killed by signal: Killed") == 2
    assert said.count("Caught InjectedFault in DataLoader worker process") == 2


def test_a_job_without_workers_in_which_one_was_to_fail_ends_with_the_reason(attempt: Attempt) -> None:
    job = attempt(2, args=small(2, 4), faults=("dataloader@data:rank=1,step=2",), code=1)
    assert "no workers (num_workers=0)" in job.said[-1]
    assert fired(job.run_dir) == {}, "it did not happen"


@pytest.mark.long
def test_slowness_during_a_recovery_prolongs_it(disturb: Disturb) -> None:
    faults = ("sigkill@forward:rank=0,step=3", "slow@recovery:rank=1,step=2,seconds=1.5")
    job = disturb(2, 4, *faults, args=DROPOUT)
    (incident,) = job.incidents
    assert incident.outcome is Outcome.RESUMED
    assert incident.headline_s is not None
    assert incident.headline_s > 1.5


@pytest.mark.long
def test_who_is_slow_for_longer_than_the_limit_hangs(disturb: Disturb) -> None:
    fault = "slow@forward:rank=2,step=3,seconds=600"
    job = disturb(4, 4, fault, args=DROPOUT, heartbeat_timeout_s=3.0)
    (incident,) = job.incidents
    assert incident.culprit == 2
    assert incident.respawned == (2,)


@pytest.mark.long
def test_who_is_slow_for_less_than_the_limit_is_not_interrupted(disturb: Disturb) -> None:
    faults = ("slow@forward:rank=1,step=2,seconds=1.5", "slow@optimizer:rank=1,step=3,seconds=1.5")
    job = disturb(2, 4, *faults, args=DROPOUT, heartbeat_timeout_s=4.0)
    assert job.incidents == []


@pytest.mark.long
def test_memory_that_runs_out_during_a_transfer(disturb: Disturb) -> None:
    faults = ("sigkill@between:rank=0,step=2", "oom@transfer:rank=1,step=2")
    job = disturb(2, 4, *faults, args=DROPOUT)
    assert job.incidents[-1].outcome is Outcome.RESUMED
    assert job.incidents[-1].target == 2
