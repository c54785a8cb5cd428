"""Test loaders that say where they stand, and orders that a generator of one's own draws, under Lightning."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.ranks.test_lightning import Train, in_every_phase
from tests.ranks.test_lightning import train as train  # the fixture

pytestmark = [pytest.mark.ranks, pytest.mark.nemo, pytest.mark.timeout(400)]

STEPS = 18  # each rank has eight batches in an epoch
with_torchdata = pytest.mark.skipif(find_spec("torchdata") is None, reason="torchdata is not installed")
KINDS = ["exception", "sigkill"]


def at_the_edges(kind: str) -> list[str]:
    """Return faults in the first step, and where epochs begin and end."""
    return [
        f"{kind}@{place}" for place in ("forward:rank=1,step=1", "between:rank=2,step=8", "data:rank=0,step=17")
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("features", ["weighted", "positioned,weighted"])
def test_a_generator_of_ones_own_draws_the_order(train: Train, features: str, kind: str) -> None:
    """It is made anew with its seed after a fault, in the third epoch too. Lightning divides the sampler."""
    train("ddp", STEPS, *in_every_phase(kind), features=features)


@pytest.mark.parametrize("kind", KINDS)
def test_where_an_epoch_begins_and_ends(train: Train, kind: str) -> None:
    train("ddp", STEPS, *at_the_edges(kind), features="positioned,weighted")


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_fault_in_the_first_step_each_epoch_has_an_order_of_its_own(train: Train, kind: str) -> None:
    train("ddp", STEPS, f"{kind}@forward:rank=1,step=1", features="positioned,weighted")


@with_torchdata
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "features",
    [
        "torchdata,workers",
        "torchdata,sharded,workers",
        "torchdata,sharded,workers,seeded-apart",  # what torchdata seeds workers with differs, and no batch
        pytest.param("torchdata", marks=pytest.mark.long),
        pytest.param("torchdata,sharded", marks=pytest.mark.long),
        pytest.param("torchdata,workers,accumulate,validation", marks=pytest.mark.long),
    ],
)
def test_torchdata(train: Train, features: str, kind: str) -> None:
    train("ddp", STEPS, *in_every_phase(kind), features=features)


@with_torchdata
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "features", ["torchdata,workers", pytest.param("torchdata,sharded", marks=pytest.mark.long)]
)
def test_torchdata_where_an_epoch_begins_and_ends(
    train: Train,
    features: str,
    kind: str,
) -> None:
    train("ddp", STEPS, *at_the_edges(kind), features=features)
