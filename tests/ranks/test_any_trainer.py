"""Test ``--fault`` and ``--record-steps`` with a Lightning trainer that knows nothing of checkpointless."""

from pathlib import Path

import pytest

from checkpointless.faults.ledger import fired
from checkpointless.observability.telemetry.steps import read_steps
from tests.ranks.agent_job import SCRIPTS, Job
from tests.ranks.jobs import Attempt

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]


def test_steps_are_recorded_and_a_fault_that_is_survived_changes_nothing(tmp_path: Path) -> None:
    pytest.importorskip("lightning.pytorch")
    fault = "slow@backward:rank=0,step=2,seconds=0.1"
    calm = Job(tmp_path / "calm", "plain_lightning.py", nproc=1, record_steps=True)
    slow = Job(tmp_path / "slow", "plain_lightning.py", nproc=1, record_steps=True, faults=[fault])
    for job in (calm, slow):
        job.end()
    steps = read_steps(slow.run_dir)[0]
    assert [record.step for record in steps] == [1, 2, 3, 4]
    assert steps == read_steps(calm.run_dir)[0]


def test_lightnings_own_strategy_resumes_from_its_own_checkpoint(attempt: Attempt) -> None:
    pytest.importorskip("lightning.pytorch")
    script, fault = str(SCRIPTS / "lightning_fit.py"), "exception@backward:rank=1,step=6"
    job = attempt(2, script=script, args=("8", "ddp", "saves", "by-name"), faults=(fault,))
    assert (job.run_dir / "saved" / "last.ckpt").exists()
    assert job.steps[0][-1].step == 8


@pytest.mark.long
def test_a_fault_that_is_not_survived_ends_the_job_with_it(tmp_path: Path) -> None:
    fault = "exception@before_optimizer:rank=0,step=3"
    job = Job(tmp_path, "plain_lightning.py", nproc=1, faults=[fault])
    ended = job.end(code=1)
    assert fired(tmp_path) == {fault: 1}
    assert f"InjectedFault: injected fault {fault}" in ended.out + ended.err
