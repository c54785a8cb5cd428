"""Test loaders that say where they stand, and orders that a generator of one's own draws, under Lightning."""

import pytest

from tests.ranks.jobs import Attempt
from tests.ranks.test_lightning import SCRIPT as SCRIPT  # for attempt
from tests.ranks.test_lightning import Train, in_phases
from tests.ranks.test_lightning import train as train  # the fixture

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

STEPS = 18  # each rank has eight batches in an epoch


@pytest.mark.long  # with torchdata, and orders of one's own, below
@pytest.mark.parametrize("features", ["positioned,weighted", "torchdata,workers", "own-batches,own-draws"])
def test_where_an_epoch_begins_and_ends(train: Train, features: str) -> None:
    if "torchdata" in features:
        pytest.importorskip("torchdata")
    faults = ("sigkill@forward:rank=1,step=1", "exception@between:rank=0,step=8", "sigkill@data:rank=0,step=17")
    train("ddp", STEPS, *faults, features=features, ranks=2)


@pytest.mark.parametrize(
    "features",
    [
        "torchdata,sharded,workers,seeded-apart",  # what torchdata seeds workers with differs, and no batch
        pytest.param("torchdata,workers,accumulate,validation", marks=pytest.mark.long),
    ],
)
def test_torchdata(train: Train, features: str) -> None:
    pytest.importorskip("torchdata")
    train("ddp", STEPS, *in_phases("between:rank=0,step=17"), features=features, ranks=2)


@pytest.mark.parametrize(
    "features",
    [
        pytest.param("own-batches,own-draws,validation", marks=pytest.mark.long),
        pytest.param("own-batches,counts,workers", marks=pytest.mark.long),
        "shuffled,buffer,workers",
    ],
)
def test_samplers_and_datasets_that_draw_or_count_for_themselves(train: Train, features: str) -> None:
    """Orders of one's own, in the third epoch too, with what a script that is entered again makes anew."""
    train("ddp", STEPS, *in_phases("between:rank=0,step=17"), features=features, ranks=2)


@pytest.mark.parametrize(
    ("features", "reason"),
    [
        ("shuffled,buffer", "Shuffled draws random numbers of the training process item by item"),
        ("own-batches,endless", "the sampler OwnBatches has no length"),
    ],
)
def test_what_could_not_be_repeated_is_refused(attempt: Attempt, features: str, reason: str) -> None:
    args = (str(STEPS), "ddp", *features.split(","))
    job = attempt(2, args=args, code=1)
    assert reason in job.story()
    assert not job.incidents
