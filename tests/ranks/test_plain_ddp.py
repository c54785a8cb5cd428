"""Test loops of one's own over torch's ``DistributedDataParallel``, whose buckets decide about the bits of sums."""

import re

import pytest

from tests.ranks.agent_job import SCRIPTS
from tests.ranks.jobs import PHASES, Attempt, Trainings, faults_in

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

STEPS = 2 * len(PHASES) + 2
SCRIPT = str(SCRIPTS / "plain_ddp.py")
SETTINGS = {"heartbeat_timeout_s": 100.0}  # compiling takes its time on a busy machine


@pytest.mark.parametrize("kind", ["exception", "sigkill"])
def test_ddp_in_every_phase(trainings: Trainings, kind: str) -> None:
    """Every rank raises and dies: DDP is made anew each time, and reduces as it would have without the fault."""
    trainings.rough(3, (str(STEPS),), *faults_in(PHASES, kind, 3), steps=STEPS)


def test_a_static_graph_is_refused(attempt: Attempt) -> None:
    job = attempt(2, args=("5", "static"), code=1)
    assert "leave static_graph out" in job.told()


@pytest.mark.parametrize(
    "compiled",
    [
        ("model", "aot_eager"),
        pytest.param(("block", "aot_eager"), marks=pytest.mark.long),
        pytest.param(("model", "inductor"), marks=pytest.mark.long),
        pytest.param(("block", "inductor"), marks=pytest.mark.long),
    ],
    ids="-".join,
)
def test_a_compiled_model(trainings: Trainings, compiled: tuple[str, str]) -> None:
    """A process that lives compiles nothing again for its next model; a new one compiles what the others have."""
    faults = (
        "exception@backward:rank=1,step=2",
        "sigkill@forward:rank=1,step=4",
        "exception@optimizer:rank=0,step=6",
    )
    args = ("7", *compiled)
    job, calm = trainings.rough(2, args, *faults, steps=7), trainings.calm(2, *args)
    graphs = [re.findall(r"^graphs: (\d+)$", each.log(rank), re.M) for each in (calm, job) for rank in (0, 1)]
    assert len(graphs[0]) == 1
    assert int(graphs[0][0]) > 0
    assert all(each == graphs[0] for each in graphs)
