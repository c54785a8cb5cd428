"""A user's own NeMo script with the three checkpointless lines comes through faults with the same bits."""

from pathlib import Path

import pytest

from checkpointless.faults.ledger import fired
from tests.ranks.jobs import Job, run_job
from tests.ranks.nemo_zygote import ROOT, Zygote

pytestmark = [pytest.mark.ranks]

SCRIPT = str(ROOT / "examples" / "train_gpt.py")
STEPS = 6
FAULTS = ("exception@backward:rank=1,step=3", "sigkill@forward:rank=0,step=4")


def _train(zygote: Zygote, run_dir: Path, nproc: int, *args: str, faults: tuple[str, ...] = ()) -> Job:
    return run_job(zygote, run_dir, nproc, script=SCRIPT, args=("--steps", str(STEPS), *args), faults=faults)


@pytest.mark.parametrize(
    ("nproc", "args"),
    [(2, ()), pytest.param(4, ("--tensor-parallel", "2"), marks=pytest.mark.long)],
    ids=["dp2", "tp2-dp2"],
)
def test_the_three_lines_suffice(nemo_zygote: Zygote, tmp_path: Path, nproc: int, args: tuple[str, ...]) -> None:
    undisturbed = _train(nemo_zygote, tmp_path / "undisturbed", nproc, *args)
    assert undisturbed.code == 0, undisturbed.story()
    assert undisturbed.incidents == []

    disturbed = _train(nemo_zygote, tmp_path / "disturbed", nproc, *args, faults=FAULTS)
    assert disturbed.code == 0, disturbed.story()
    assert fired(disturbed.run_dir) == {fault: 1 for fault in FAULTS}
    assert len(disturbed.incidents) == len(FAULTS)

    disturbed.assert_same(undisturbed.steps)
    for rank in range(nproc):
        assert [record.step for record in undisturbed.steps[rank]] == list(range(1, STEPS + 1))
