"""Test loaders that say where they stand, and orders that a generator of one's own draws, under Lightning."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.ranks.jobs import run_job
from tests.ranks.nemo_zygote import Zygote
from tests.ranks.test_lightning import KINDS, SCRIPT, Train, in_phases
from tests.ranks.test_lightning import train as train  # the fixture

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

STEPS = 18  # each rank has eight batches in an epoch
with_torchdata = pytest.mark.skipif(find_spec("torchdata") is None, reason="torchdata is not installed")
KILLS = ["sigkill", pytest.param("exception", marks=pytest.mark.long)]


def at_the_edges(kind: str) -> list[str]:
    """Return faults in the first step, and where epochs begin and end."""
    return [
        f"{kind}@{place}" for place in ("forward:rank=1,step=1", "between:rank=0,step=8", "data:rank=0,step=17")
    ]


@pytest.mark.long  # with torchdata, and orders of one's own, below
@pytest.mark.parametrize("kind", KILLS)
def test_where_an_epoch_begins_and_ends(train: Train, kind: str) -> None:
    train("ddp", STEPS, *at_the_edges(kind), features="positioned,weighted", ranks=2)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["exception", "sigkill"])
def test_after_a_fault_in_the_first_step_each_epoch_has_an_order_of_its_own(train: Train, kind: str) -> None:
    train("ddp", STEPS, f"{kind}@forward:rank=1,step=1", features="positioned,weighted", ranks=2)


@with_torchdata
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "features",
    [
        pytest.param("torchdata,workers", marks=pytest.mark.long),
        pytest.param("torchdata,sharded,workers", marks=pytest.mark.long),
        "torchdata,sharded,workers,seeded-apart",  # what torchdata seeds workers with differs, and no batch
        pytest.param("torchdata", marks=pytest.mark.long),
        pytest.param("torchdata,sharded", marks=pytest.mark.long),
        pytest.param("torchdata,workers,accumulate,validation", marks=pytest.mark.long),
    ],
)
def test_torchdata(train: Train, features: str, kind: str) -> None:
    train("ddp", STEPS, *in_phases(kind, "between:rank=0,step=17"), features=features, ranks=2)


@pytest.mark.long
@with_torchdata
@pytest.mark.parametrize("kind", ["exception", "sigkill"])
@pytest.mark.parametrize("features", ["torchdata,workers", "torchdata,sharded"])
def test_torchdata_where_an_epoch_begins_and_ends(
    train: Train,
    features: str,
    kind: str,
) -> None:
    train("ddp", STEPS, *at_the_edges(kind), features=features, ranks=2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "features",
    [
        pytest.param("own-batches", marks=pytest.mark.long),  # drawn one by one from the rank's stream
        pytest.param("own-batches,workers", marks=pytest.mark.long),
        pytest.param("own-batches,own-draws,validation", marks=pytest.mark.long),
        pytest.param("own-batches,own-draws,workers", marks=pytest.mark.long),
        pytest.param("own-batches,counts,validation", marks=pytest.mark.long),
        pytest.param("own-batches,counts,workers", marks=pytest.mark.long),
        pytest.param("shuffled", marks=pytest.mark.long),
        "shuffled,buffer,workers",
    ],
)
def test_samplers_and_datasets_that_draw_or_count_for_themselves(train: Train, features: str, kind: str) -> None:
    """Orders of one's own, in the third epoch too, with what a script that is entered again makes anew."""
    train("ddp", STEPS, *in_phases(kind, "between:rank=0,step=17"), features=features, ranks=2)


@pytest.mark.long  # the test above has a fault behind the last step of an epoch
@pytest.mark.parametrize("kind", KILLS)
@pytest.mark.parametrize(
    "features",
    [
        "own-batches",
        "own-batches,own-draws",
        "shuffled",
    ],
)
def test_where_an_epoch_of_ones_own_order_begins_and_ends(train: Train, features: str, kind: str) -> None:
    train("ddp", STEPS, *at_the_edges(kind), features=features, ranks=2)


@pytest.mark.parametrize(
    ("features", "reason"),
    [
        ("shuffled,buffer", "Shuffled draws random numbers of the training process item by item"),
        ("own-batches,endless", "the sampler OwnBatches has no length"),
    ],
)
def test_what_could_not_be_repeated_is_refused(
    nemo_zygote: Zygote, tmp_path: Path, features: str, reason: str
) -> None:
    args = (str(STEPS), "ddp", *features.split(","))
    job = run_job(nemo_zygote, tmp_path / "run", 2, script=SCRIPT, args=args)
    assert job.code != 0
    assert reason in job.story()
    assert not job.incidents
