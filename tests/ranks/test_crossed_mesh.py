"""Test a loop whose tensors are replicated along different dimensions of a mesh, so that no two ranks are alike."""

import re
from collections.abc import Callable

import pytest

from tests.ranks.agent_job import SCRIPTS
from tests.ranks.jobs import Attempt, Job, Trainings

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

STEPS = 8
SCRIPT = str(SCRIPTS / "crossed_mesh.py")
Train = Callable[..., Job]


def ends(job: Job) -> list[str]:
    """Return what each rank says of its end: plain numbers of its optimizer, and its own buffer."""
    return [re.findall(r"norms .*", job.log(rank))[-1] for rank in range(4)]


@pytest.fixture
def train(trainings: Trainings) -> Train:
    undisturbed = trainings.calm(4, str(STEPS))
    assert "a rank that dies cannot be restored" not in undisturbed.log(0)
    assert len(set(ends(undisturbed))) == 4, "each rank has numbers of its own"

    def compared(*faults: str, extra: tuple[str, ...] = ()) -> Job:
        job = trainings.rough(4, (str(STEPS),), *faults, steps=STEPS, more=extra)
        assert ends(job) == ends(undisturbed)
        return job

    return compared


def test_two_deaths_that_leave_every_part_a_holder(train: Train) -> None:
    """Ranks 0 and 3 have nothing in common but the bias."""
    job = train("sigkill@before_optimizer:rank=0,step=3", "sigkill@recovery:rank=3,step=2")
    assert job.incidents[-1].sources == (1, 2)


@pytest.mark.long  # test_plain_fsdp2.py has every phase
def test_parts_of_different_holders_are_not_compared(train: Train) -> None:
    job = train("exception@forward:rank=2,step=3", "sigkill@optimizer:rank=1,step=6", extra=("checksum",))
    assert len(job.incidents[1].sources) == 3, "of the bias all other ranks are holders"


@pytest.mark.parametrize(
    ("args", "faults", "reason"),
    [
        pytest.param(  # the bit is flipped late: in the first steps, the loop is taken to have changed it
            (str(STEPS), "checksum"),
            (
                "bitflip@between:rank=1,step=5",
                "exception@backward:rank=2,step=6",
            ),  # all have met in the forward pass
            r"the replicas of the shard of ranks 0, 1 \(model\.0\.up\) differ at step 5",
            id="a-flipped-bit-and-nobody-knows-which-holder-is-right",
        ),
        pytest.param(
            (str(STEPS),),
            ("sigkill@before_optimizer:rank=0,step=3", "sigkill@recovery:rank=2,step=2"),
            r"no living rank holds the shard of ranks 0, 2 \(model.0.down\); the last committed step was 2",
            id="the-last-holder-of-a-part-is-lost",
        ),
        pytest.param(
            ("3", "own"),
            (),
            "ranks 0, 1, 2, 3 are to hold the same model.0.bias, and it begins with other values",
            id="a-parameter-that-is-a-ranks-own-and-that-no-mesh-tells",
        ),
    ],
)
def test_what_ends_the_job(attempt: Attempt, args: tuple[str, ...], faults: tuple[str, ...], reason: str) -> None:
    job = attempt(4, args=args, faults=faults, code=1)
    assert re.search(reason, job.said[-1])
    assert bool(list(job.run_dir.glob("steps/*"))) == bool(faults), "what is refused makes no step"


def test_only_what_has_no_second_holder_is_warned_of_by_name(attempt: Attempt) -> None:
    job = attempt(4, args=("2", "alone"))
    assert "no two ranks hold the same model.0.up (others have more holders): a rank that dies cannot" in job.log(0)
