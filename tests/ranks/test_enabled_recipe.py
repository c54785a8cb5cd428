"""A recipe of NeMo's collection, enabled and run by NeMo-Run, comes through faults with the same bits."""

from pathlib import Path

import pytest

from checkpointless.faults.ledger import fired
from checkpointless.telemetry.incidents import Outcome
from checkpointless.telemetry.verify import compare
from tests.ranks.jobs import Job, run_job
from tests.ranks.nemo_zygote import ROOT, Zygote

pytestmark = [pytest.mark.ranks, pytest.mark.nemo]

SCRIPT = str(ROOT / "examples" / "nemo_run_recipe.py")
STEPS = 6
FAULTS = ("exception@backward:rank=1,step=3", "sigkill@forward:rank=2,step=4")


def _train(zygote: Zygote, run_dir: Path, faults: tuple[str, ...] = ()) -> Job:
    args = ("--steps", str(STEPS), "--dir", str(run_dir / "nemo"))
    return run_job(zygote, run_dir, 4, script=SCRIPT, args=args, faults=faults)


def test_every_object_is_made_anew_and_every_bit_is_the_same(nemo_zygote: Zygote, tmp_path: Path) -> None:
    undisturbed = _train(nemo_zygote, tmp_path / "undisturbed")
    assert undisturbed.code == 0, undisturbed.story()
    assert undisturbed.incidents == []

    disturbed = _train(nemo_zygote, tmp_path / "disturbed", FAULTS)
    assert disturbed.code == 0, disturbed.story()
    assert fired(disturbed.run_dir) == {fault: 1 for fault in FAULTS}
    assert [incident.outcome for incident in disturbed.incidents] == [Outcome.RESUMED, Outcome.RESUMED]
    assert [incident.respawned for incident in disturbed.incidents] == [(), (2,)]

    verdict = compare(undisturbed.steps, disturbed.steps)
    assert verdict.equal, f"{verdict.sentence}\n{disturbed.story()}"
    assert verdict.steps == STEPS
