"""Test loops of one's own over FSDP2: HSDP meshes, with tensor parallelism, and without replicas."""

import math
from collections.abc import Callable

import pytest

from tests.ranks.agent_job import SCRIPTS
from tests.ranks.jobs import PHASES, Attempt, Job, Trainings, faults_in

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

SCRIPT = str(SCRIPTS / "plain_fsdp2.py")
Mesh = tuple[int, int, int]  # replicas, shards, tensor-parallel ranks
HSDP, WITH_TP, FULLY_SHARDED = (2, 2, 1), (2, 2, 2), (1, 4, 1)
Train = Callable[..., Job]


@pytest.fixture
def train(trainings: Trainings) -> Train:
    def compared(mesh: Mesh, steps: int, *faults: str, extra: tuple[str, ...] = ()) -> Job:
        args = (str(steps), *map(str, mesh))
        return trainings.rough(math.prod(mesh), args, *faults, steps=steps, more=extra)

    return compared


@pytest.mark.parametrize("kind", [pytest.param("exception", marks=pytest.mark.long), "sigkill"])
def test_hsdp_in_every_phase(train: Train, kind: str) -> None:
    """Each rank has two faults at least; the shard of a rank that dies comes from the other row of the mesh."""
    job = train(HSDP, 2 * len(PHASES) + 2, *faults_in(PHASES, kind, 4))
    if kind == "sigkill":
        assert [incident.sources for incident in job.incidents] == [
            ((incident.respawned[0] + 2) % 4,) for incident in job.incidents
        ]


@pytest.mark.long
def test_hsdp_with_tensor_parallelism(train: Train) -> None:
    """The parts of tensor-parallel ranks differ, and those of the two replicas do not."""
    job = train(WITH_TP, 8, "sigkill@backward:rank=1,step=3", "exception@forward:rank=6,step=5")
    assert job.incidents[0].sources == (5,)


@pytest.mark.long
def test_both_replicas_of_a_shard_are_lost(attempt: Attempt) -> None:
    faults = ("sigkill@before_optimizer:rank=1,step=3", "sigkill@recovery:rank=3,step=2")
    args = ("5", "2", "2", "1")
    job = attempt(4, args=args, faults=faults, code=1)
    assert "no living rank holds the shard of ranks 1, 3" in job.said[-1]


@pytest.mark.long
def test_fully_sharded_with_copies_at_a_neighbor(train: Train) -> None:
    """No rank holds what another one does; exceptions cost nothing, and a rank that dies comes back from a copy."""
    job = train(FULLY_SHARDED, 8, "exception@backward:rank=2,step=3", "sigkill@forward:rank=1,step=6")
    assert [incident.resumed_after for incident in job.incidents] == [2, 5]


def test_weights_that_were_exchanged_for_an_evaluation_are_not_taken_for_the_trained_ones(train: Train) -> None:
    """The rank whose weights are others is filled by its replica."""
    job = train(HSDP, 5, "exception@between:rank=1,step=2", extra=("averaged",))
    assert "given up: parameters were changed beside the update since step 2" in job.log(1)


def test_an_optimizer_that_communicates_is_refused_in_its_first_step(attempt: Attempt) -> None:
    args = ("5", "2", "2", "1", "muon")
    job = attempt(4, args=args, code=1)
    assert "an optimizer communicates in its step" in job.told()
