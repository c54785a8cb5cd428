"""Test the contract of a script (docs/contract.md): declared state and plain attributes are exact after faults."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpointless.faults.ledger import fired
from checkpointless.observability.report.verify import compare
from tests.ranks.agent_job import SCRIPTS
from tests.ranks.jobs import Job, run_job
from tests.ranks.nemo_zygote import Zygote

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

Calm = Callable[..., Job]
STEPS = 14
LONG = [pytest.param(kind, marks=pytest.mark.long) for kind in ("average", "draws", "scaler")]
#: In steps of the second and the third epoch; the last finds a rank whose process is new.
FAULTS = (
    "exception@before_optimizer:rank=1,step=7",
    "sigkill@forward:rank=0,step=9",
    "sigkill@optimizer:rank=1,step=12",
)


@pytest.fixture(scope="module")
def calm(nemo_zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Calm:
    @functools.cache
    def train(script: str, *args: str) -> Job:
        folder = tmp_path_factory.mktemp("calm") / "run"
        job = run_job(nemo_zygote, folder, 2, script=str(SCRIPTS / script), args=args)
        assert job.code == 0, job.story()
        return job

    return train


def _equal(
    zygote: Zygote, calm: Calm, folder: Path, script: str, args: tuple[str, ...], faults: tuple[str, ...]
) -> Job:
    job = run_job(zygote, folder / "rough", 2, script=str(SCRIPTS / script), args=args, faults=faults)
    assert job.code == 0, job.story()
    assert fired(job.run_dir) == dict.fromkeys(faults, 1), job.story()
    job.assert_same(calm(script, *args).steps)
    return job


@pytest.mark.parametrize("kind", ["clip", "workers", "optimizer", *LONG])
def test_a_loop_gets_back_what_it_declares(nemo_zygote: Zygote, calm: Calm, tmp_path: Path, kind: str) -> None:
    job = _equal(nemo_zygote, calm, tmp_path, "contract_loop.py", (str(STEPS), kind), FAULTS)
    said = "\n".join(job.log(rank) for rank in range(2))
    assert f"norms of {STEPS} steps" in said, said
    assert "begin anew" not in said, said
    assert "what an undisturbed run computes" not in said, said


def test_a_loop_that_does_not_declare_is_warned_before_it_parts(
    nemo_zygote: Zygote, calm: Calm, tmp_path: Path
) -> None:
    args = (str(STEPS), "clip", "undeclared")
    script = str(SCRIPTS / "contract_loop.py")
    job = run_job(nemo_zygote, tmp_path / "rough", 2, script=script, args=args, faults=FAULTS[:1])
    assert "these variables of the loop change from step to step" in job.log(0), job.story()
    assert "average, generator, norms" not in job.log(0), "nothing draws from the generator"
    assert not compare(calm("contract_loop.py", *args).steps, job.steps).equal, "so this test can fail"


def test_an_optimizer_with_state_of_its_own_is_refused_where_it_is_not_registered(
    nemo_zygote: Zygote, tmp_path: Path
) -> None:
    script = str(SCRIPTS / "contract_loop.py")
    job = run_job(nemo_zygote, tmp_path / "run", 2, script=script, args=(str(STEPS), "optimizer", "undeclared"))
    assert job.code == 1, job.story()
    assert "Paced keeps 'pace' in its state_dict" in job.said[-1], job.story()
    assert "checkpointless.register_optimizer_state" in job.said[-1], job.story()


@pytest.mark.parametrize(
    ("kind", "faults"),
    [
        # Step 7 is the first of an epoch, whose persistent workers are started again.
        ("clip", ("exception@optimizer:rank=1,step=7", "sigkill@optimizer:rank=0,step=11")),
        pytest.param(
            "average",
            (
                "sigkill@forward:rank=0,step=4",
                "exception@after_optimizer:rank=1,step=9",
                "sigkill@between:rank=1,step=14",
            ),
            marks=pytest.mark.long,
        ),
    ],
)
def test_plain_attributes_and_the_state_of_callbacks_are_each_ranks_own(
    nemo_zygote: Zygote, calm: Calm, tmp_path: Path, kind: str, faults: tuple[str, ...]
) -> None:
    """Also a validation loader with persistent workers does not move the training's streams."""
    job = _equal(nemo_zygote, calm, tmp_path, "contract_lightning.py", (kind,), faults)

    def results(of: Job) -> list[str]:
        lines = [line for rank in range(2) for line in of.log(rank).splitlines()]
        return sorted({line[line.index("RESULT") :] for line in lines if "RESULT" in line})

    undisturbed = results(calm("contract_lightning.py", kind))
    assert len(undisturbed) == 6, undisturbed
    assert results(job) == undisturbed
    said = "\n".join(job.log(rank) for rank in range(2))
    assert said.count("Mean.hidden") == 2, "what is left out is named once in each process of rank 0"
    assert "gets a peer's" not in said, said
