"""Test every trainer of the demo, as ``checkpointless demo --trainer`` runs it, through many incidents."""

from importlib.util import find_spec

import pytest

from checkpointless.testing.demo.trainers import TRAINERS, Task
from tests.ranks.jobs import PHASES, TrainingsOf, require_nothing_left

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

INCIDENTS = 10
SCRIPTED = [
    ("ddp", 5),  # the others have tests of their own
    *(pytest.param(name, INCIDENTS, marks=pytest.mark.long) for name in TRAINERS if name != "nemo"),
]


@pytest.mark.long
@pytest.mark.parametrize(("trainer", "incidents"), SCRIPTED)
def test_many_incidents_leave_nothing_behind(trainings_of: TrainingsOf, trainer: str, incidents: int) -> None:
    """The other ranks raise and die by turns; rank 0 lives through it all."""
    ranks = 4 if incidents == INCIDENTS else 2
    task = Task(nproc=ranks, steps=incidents * 4 + 2, dropout=0.1, workers=1)
    faults = [
        f"{'exception' if at % 3 else 'sigkill'}@{PHASES[at % 7]}:rank={1 + at % (ranks - 1)},step={4 * at + 2}"
        for at in range(incidents)
    ]
    module, arguments = TRAINERS[trainer].program(task)
    found = find_spec(module)
    assert found is not None
    job = trainings_of(str(found.origin)).rough(ranks, tuple(arguments), *faults, steps=task.steps)
    assert len(job.incidents) == incidents
    require_nothing_left(job, 0, incidents)
