"""Test loops of one's own over torch's ``DistributedDataParallel``, whose buckets decide about the bits of sums."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from checkpointless.faults.ledger import fired
from tests.ranks.agent_job import SCRIPTS
from tests.ranks.jobs import Job, run_job
from tests.ranks.nemo_zygote import Zygote

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

PHASES = ("data", "forward", "backward", "before_optimizer", "optimizer", "after_optimizer", "between")
STEPS = 2 * len(PHASES) + 2


def _train(
    zygote: Zygote, run_dir: Path, *faults: str, args: tuple[str, ...] = (str(STEPS),), ranks: int = 2
) -> Job:
    limits = {"heartbeat_timeout_s": 100.0}  # compiling takes its time on a busy machine
    return run_job(zygote, run_dir, ranks, script=str(SCRIPTS / "plain_ddp.py"), args=args, faults=faults, **limits)


@pytest.fixture(scope="module")
def undisturbed(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return _train(zygote, tmp_path_factory.mktemp("ddp") / "undisturbed", ranks=3)


def test_ddp_in_every_phase(zygote: Zygote, undisturbed: Job, tmp_path: Path) -> None:
    """Every rank raises and dies: DDP is made anew each time, and reduces as it would have without the fault."""
    for kind in ("exception", "sigkill"):
        faults = [f"{kind}@{phase}:rank={at % 3},step={2 * at + 2}" for at, phase in enumerate(PHASES)]
        job = _train(zygote, tmp_path / kind, *faults, ranks=3)
        assert job.code == 0, job.story()
        assert fired(job.run_dir) == dict.fromkeys(faults, 1)
        job.assert_same(undisturbed.steps, STEPS)


def test_a_static_graph_is_refused(zygote: Zygote, tmp_path: Path) -> None:
    job = _train(zygote, tmp_path / "run", args=("5", "static"))
    assert job.code == 1
    assert "leave static_graph out" in "\n".join([*job.said, *(job.log(rank) for rank in range(2))])


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
def test_a_compiled_model(zygote: Zygote, tmp_path: Path, compiled: tuple[str, str]) -> None:
    """A process that lives compiles nothing again for its next model; a new one compiles what the others have."""
    faults = (
        "exception@backward:rank=1,step=2",
        "sigkill@forward:rank=1,step=4",
        "exception@optimizer:rank=0,step=6",
    )
    calm = _train(zygote, tmp_path / "calm", args=("7", *compiled))
    job = _train(zygote, tmp_path / "run", *faults, args=("7", *compiled))
    assert (calm.code, job.code) == (0, 0), job.story()
    assert fired(job.run_dir) == dict.fromkeys(faults, 1)
    job.assert_same(calm.steps, 7)
    graphs = [re.findall(r"^graphs: (\d+)$", each.log(rank), re.M) for each in (calm, job) for rank in (0, 1)]
    assert len(graphs[0]) == 1
    assert int(graphs[0][0]) > 0
    assert all(each == graphs[0] for each in graphs)
