"""Test loops of one's own over FSDP2: HSDP meshes, with tensor parallelism, and without replicas."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks.agent_job import SCRIPTS
from tests.ranks.jobs import Job, Trainings, run_job
from tests.ranks.nemo_zygote import Zygote

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

SCRIPT = str(SCRIPTS / "plain_fsdp2.py")
Mesh = tuple[int, int, int]  # replicas, shards, tensor-parallel ranks
HSDP, WITH_TP, FULLY_SHARDED = (2, 2, 1), (2, 2, 2), (1, 4, 1)
Train = Callable[..., Job]


@pytest.fixture(scope="module")
def train(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Train:
    trainings = Trainings(zygote, tmp_path_factory, SCRIPT)

    def compared(mesh: Mesh, steps: int, *faults: str, extra: tuple[str, ...] = ()) -> Job:
        args = (str(steps), *map(str, mesh))
        return trainings.rough(math.prod(mesh), args, *faults, steps=steps, more=extra)

    return compared


PHASES = ("data", "forward", "backward", "before_optimizer", "optimizer", "after_optimizer", "between")


@pytest.mark.parametrize("kind", [pytest.param("exception", marks=pytest.mark.long), "sigkill"])
def test_hsdp_in_every_phase(train: Train, kind: str) -> None:
    """Each rank has two faults at least; the shard of a rank that dies comes from the other row of the mesh."""
    steps = range(2, 2 * len(PHASES) + 1, 2)
    faults = [f"{kind}@{phase}:rank={step // 2 % 4},step={step}" for step, phase in zip(steps, PHASES)]
    job = train(HSDP, steps[-1] + 2, *faults)
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
def test_both_replicas_of_a_shard_are_lost(zygote: Zygote, tmp_path: Path) -> None:
    faults = ("sigkill@before_optimizer:rank=1,step=3", "sigkill@recovery:rank=3,step=2")
    script, args = SCRIPT, ("5", "2", "2", "1")
    job = run_job(zygote, tmp_path / "run", 4, script=script, args=args, faults=faults)
    assert job.code == 1
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


def test_an_optimizer_that_communicates_is_refused_in_its_first_step(zygote: Zygote, tmp_path: Path) -> None:
    script, args = SCRIPT, ("5", "2", "2", "1", "muon")
    job = run_job(zygote, tmp_path / "run", 4, script=script, args=args)
    assert job.code == 1
    assert "an optimizer communicates in its step" in "\n".join([*job.said, *(job.log(rank) for rank in range(4))])
