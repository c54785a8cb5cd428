"""Test loops of one's own with Megatron's DDP and optimizers, in all layouts, through faults in every phase."""

import re
from collections.abc import Callable

import pytest

from checkpointless.observability.telemetry.event_names import EventName
from tests.ranks.agent_job import SCRIPTS
from tests.ranks.jobs import PHASES, Attempt, Job, Trainings, faults_in

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

SCRIPT = str(SCRIPTS / "megatron_loop.py")
Train = Callable[..., Job]


@pytest.fixture
def train(trainings: Trainings) -> Train:
    def compared(ranks: int, steps: int, layout: str, *faults: str) -> Job:
        return trainings.rough(ranks, (str(steps), *layout.split()), *faults, steps=steps)

    return compared


@pytest.mark.parametrize("kind", [pytest.param("exception", marks=pytest.mark.long), "sigkill"])
def test_the_distributed_optimizer_in_every_phase(train: Train, kind: str) -> None:
    train(4, 16, "bf16=1", *faults_in(PHASES, kind, 4))


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(8, "tp=2 pp=2", marks=pytest.mark.long),
        pytest.param(4, "tp=2 bf16=1 overlap=1", marks=pytest.mark.long),
        (4, "pp=2 distributed=0"),
        pytest.param(2, "distributed=0 bf16=1", marks=pytest.mark.long),
    ],
    ids=["tp2-pp2-dp2", "tp2-overlap", "pp2-fp32", "mixed-precision"],
)
def test_layouts_and_optimizers(train: Train, ranks: int, layout: str) -> None:
    faults = ("sigkill@forward:rank=1,step=2", "exception@optimizer:rank=0,step=4", "sigkill@between:rank=1,step=5")
    train(ranks, 7, layout, *faults)


def test_modules_that_no_longer_train_stay_so(train: Train) -> None:
    """A dropout that acts no more from the second step on, in ranks that live and in a new one."""
    train(2, 6, "stills=2", "exception@forward:rank=0,step=4", "sigkill@forward:rank=1,step=6")


@pytest.mark.long
@pytest.mark.parametrize("precision", ["", " bf16=1"], ids=["fp32", "bf16"])
def test_dense_parameters_come_from_more_ranks_than_experts(train: Train, precision: str) -> None:
    """All ranks hold the dense parameters, and ranks 1 and 3 the same experts."""
    faults = (
        "exception@optimizer:rank=2,step=2",
        "sigkill@backward:rank=1,step=4",
        "sigkill@optimizer:rank=0,step=6",
    )
    job = train(4, 8, "ep=2 distributed=0" + precision, *faults)
    everybody, experts = {"holders": 4, "sources": [0, 2, 3]}, {"holders": 2, "sources": [3]}
    decided = [event.fields for event in job.events(EventName.DECIDE)]
    assert next(each["parts"] for each in decided if each.get("refills", {}).keys() == {"1"}) == {
        "1": [everybody, experts]
    }
    received = [event.fields for event in job.events(EventName.TRANSFER)]
    assert {(0, 2, 3), (1, 2, 3)} <= {tuple(each["sources"]) for each in received if each.get("bytes")}


def test_experts_whose_last_holder_dies_are_named(attempt: Attempt) -> None:
    """Of the dense parameters there still are two holders."""
    faults = ("sigkill@before_optimizer:rank=1,step=3", "sigkill@recovery:rank=3,step=2")
    args = ("5", "ep=2", "distributed=0")
    job = attempt(4, args=args, faults=faults, code=1)
    assert re.search(r"no living rank holds the shard of ranks 1, 3 \(model\.0\.\S+experts\S+\); ", job.said[-1])


def test_parameters_that_an_optimizer_is_given_later_are_noticed_at_once(attempt: Attempt) -> None:
    job = attempt(2, args=("5", "adds=3"), code=1)
    assert "an optimizer has other parameters than at the beginning (add_param_group)" in job.said[-1]
    assert len(job.steps[0]) == 2


@pytest.mark.long  # test_tiers.py has a neighbor
def test_one_instance_with_copies_at_a_neighbor(train: Train) -> None:
    """The copies of a step are made when the next one begins, and training waits for them here."""
    job = train(4, 7, "instances=1 bf16=1", "sigkill@forward:rank=1,step=2", "exception@backward:rank=0,step=4")
    assert [incident.resumed_after for incident in job.incidents] == [1, 3]


@pytest.mark.long
def test_steps_that_overflow_are_skipped_again(train: Train) -> None:
    """The loss scale begins too high: the first steps change nothing but the scale."""
    faults = ("sigkill@before_optimizer:rank=1,step=2", "sigkill@forward:rank=0,step=5")
    train(4, 12, "fp16=1", *faults)
