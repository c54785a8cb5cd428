"""Test what is recorded of a step and of checkpoints, and that nothing follows from aborted collectives."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from checkpointless.callbacks import step_recorder
from checkpointless.callbacks.step_recorder import StepRecorder, _checkpoint_names
from checkpointless.inprocess import RankShouldRestart
from checkpointless.integrations.torch.loop import JournaledTraining
from checkpointless.observability.telemetry.steps import StepLog

pytestmark = pytest.mark.nemo


class Call:
    is_over = False

    def leave_if_over(self) -> None:
        if self.is_over:
            raise RankShouldRestart


@pytest.fixture(params=[True, False], ids=["over", "goes-on"])
def call(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Call:
    call = Call()

    def digest(*_: object) -> str:
        call.is_over = request.param
        return "garbage" if call.is_over else "whole"

    monkeypatch.setattr(step_recorder, "active_call_wrapper", lambda: call)
    monkeypatch.setattr(step_recorder, "_complete_parameters", lambda trainer: None)
    monkeypatch.setattr(step_recorder, "_extras_of", lambda *_: {})
    monkeypatch.setattr(step_recorder, "_digest_of_parameters", digest)
    monkeypatch.setattr("checkpointless.integrations.torch.loop.digest_parameters", digest)
    return call


def recorded(folder: Path) -> list[str]:
    return [path.read_text() for path in folder.rglob("*.jsonl") if path.read_text()]


def require_whole(call: Call, folder: Path, record: Callable[[], object]) -> None:
    try:
        record()
    except RankShouldRestart:
        assert recorded(folder) == []
    else:
        assert not call.is_over
        assert "whole" in recorded(folder)[0]


def test_a_step_is_recorded_if_its_generation_went_on_meanwhile(call: Call, tmp_path: Path) -> None:
    trainer: Any = SimpleNamespace(
        global_step=4,
        fit_loop=SimpleNamespace(_should_accumulate=lambda: False),
        strategy=SimpleNamespace(),
        lightning_module=SimpleNamespace(automatic_optimization=False),
    )
    recorder = StepRecorder(StepLog(tmp_path, 0))
    outputs: Any = {"loss": 0.5}
    require_whole(
        call, tmp_path, lambda: recorder.on_train_batch_end(trainer, pl.LightningModule(), outputs, None, 0)
    )


def test_so_is_one_of_a_loop_of_ones_own(call: Call, tmp_path: Path) -> None:
    state = SimpleNamespace(modules=[], rates=list, shard=dict)
    own = SimpleNamespace(streams=SimpleNamespace(digests=lambda step: None))
    manager = SimpleNamespace(own=own)
    loop: Any = SimpleNamespace(
        _log=StepLog(tmp_path, 0), _call=call, step=4, state=state, _manager=manager, _epoch=lambda: 0
    )
    require_whole(call, tmp_path, lambda: JournaledTraining._record(loop, 0.5))


def test_a_checkpoint_that_is_being_removed_is_not_there(tmp_path: Path) -> None:
    for name in ("step=3.ckpt", "step=4.ckpt"):
        (tmp_path / name).touch()

    def _remove_checkpoint(path: Path) -> None:  # NeMo gives a thread its function of this name
        time.sleep(0.3)
        path.unlink()

    removal = threading.Thread(target=_remove_checkpoint, args=(tmp_path / "step=3.ckpt",))
    removal.start()
    trainer: Any = SimpleNamespace(callbacks=[ModelCheckpoint(tmp_path)])
    assert _checkpoint_names(trainer) == [["step=4.ckpt"]]
    assert not removal.is_alive()
