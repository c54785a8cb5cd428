"""Check that the callbacks that a fit needs are added once, whatever the trainer was given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nemo.lightning", reason="needs NeMo")

from lightning.pytorch.callbacks import Callback

from checkpointless.callbacks import CheckpointlessCallback, HPFaultInjectionCallback, StepRecorder
from checkpointless.callbacks.external import asked_for
from checkpointless.integrations.lightning.recoverable_strategy import _complete
from checkpointless.system.environment import FAULTS_ENV, RECORD_STEPS_ENV, RUN_DIR_ENV, YES

pytestmark = pytest.mark.nemo


def test_a_callback_with_settings_stays_the_only_one() -> None:
    given = CheckpointlessCallback(enable_checksum=True)
    present: list[Any] = [given]
    assert _complete(present) is given
    assert _complete(present) is given
    assert present == [given]


@pytest.fixture
def asking(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Set the environment as ``--record-steps`` and ``--fault`` do."""
    monkeypatch.setenv(RUN_DIR_ENV, str(tmp_path))
    monkeypatch.setenv(RECORD_STEPS_ENV, YES)
    monkeypatch.setenv(FAULTS_ENV, json.dumps(["exception@data:rank=0,step=1"]))


@pytest.mark.usefixtures("asking")
def test_what_the_command_line_asks_for_comes_last_and_once() -> None:
    external, users = asked_for(), Callback()
    assert [type(callback) for callback in external] == [StepRecorder, HPFaultInjectionCallback]
    present: list[Any] = [*external, users]
    added = _complete(present)
    assert present == [users, added, *external]
    assert _complete(present) is added
    assert present == [users, added, *external]


@pytest.mark.usefixtures("asking")
def test_a_script_that_records_steps_itself_records_them_once() -> None:
    recorder, faults = asked_for()
    mine = StepRecorder.from_environment()
    present: list[Any] = [recorder, faults, mine]
    added = _complete(present)
    assert present == [mine, added, faults]
