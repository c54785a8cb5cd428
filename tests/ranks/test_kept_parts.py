"""Test that an optimizer or a wrapper that is kept goes with the module that it was made for, or is built anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointless.faults.ledger import fired
from checkpointless.report.verify import compare
from checkpointless.telemetry.event_names import EventName
from checkpointless.telemetry.events import read_events
from tests.ranks.agent_job import SCRIPTS
from tests.ranks.jobs import run_job
from tests.ranks.nemo_zygote import Zygote

pytestmark = [pytest.mark.ranks, pytest.mark.nemo, pytest.mark.timeout(400)]

STEPS = 6
_OPTIMIZER_ALONE = "an optimizer that keep() returned has parameters of a module that it did not return"


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("global", _OPTIMIZER_ALONE),
        ("closure", _OPTIMIZER_ALONE),
        ("method", _OPTIMIZER_ALONE),
        ("around", "build uses a Sequential that keep() did not return"),
        ("both", ""),
    ],
)
def test_what_is_kept_goes_with_its_module(nemo_zygote: Zygote, tmp_path: Path, word: str, reason: str) -> None:
    script, args = str(SCRIPTS / "plain_kept_parts.py"), (str(STEPS), word)
    calm = run_job(nemo_zygote, tmp_path / "calm", 3, script=script, args=args)
    assert calm.code == 0, calm.story()
    faults = ("exception@forward:rank=1,step=3", "sigkill@forward:rank=0,step=5")
    job = run_job(nemo_zygote, tmp_path / "run", 3, script=script, args=args, faults=faults)
    assert job.code == 0, job.story()
    assert fired(job.run_dir) == dict.fromkeys(faults, 1)
    verdict = compare(calm.steps, job.steps)
    assert verdict.equal, f"{verdict.sentence}\n{job.story()}"
    told = [event.fields for event in read_events(job.run_dir) if event.stage == EventName.WARM]
    assert {each.get("reason", "") for each in told} == {reason}, told
    assert [each["kept"] for each in told] == ([False] * 5 if reason else [True] * 10), told
