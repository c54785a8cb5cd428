"""Test that Lightning, which guesses since 2.6 where its loops resume, has nothing to guess if that is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest

from checkpointless.recovery.moment import Stage
from checkpointless.strategies.boundary.loops import Resumption, make_resumable

pytestmark = pytest.mark.nemo

Loops = tuple[Any, Any, list[str]]


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> Loops:
    """Return a fit loop and its epoch loop, resumable, and a list of those where Lightning was left to guess."""
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, barebones=True)
    guessed: list[str] = []
    fit_loop: Any = trainer.fit_loop
    for loop, name in ((fit_loop, "fit"), (fit_loop.epoch_loop, "epoch")):

        def guess(_: Any, name: str = name) -> None:
            guessed.append(name)

        monkeypatch.setattr(type(loop), "update_restart_stage", guess, raising=False)
    make_resumable(trainer, observer=None)  # type: ignore[arg-type]
    return fit_loop, fit_loop.epoch_loop, guessed


def nothing(*_: Callable[[], None]) -> None: ...


def test_a_start_is_lightnings_own(loops: Loops) -> None:
    fit_loop, epoch_loop, guessed = loops
    fit_loop.update_restart_stage()
    epoch_loop.update_restart_stage()
    assert guessed == ["fit", "epoch"]


@pytest.mark.parametrize("begins_epoch", [False, True])
def test_where_it_resumes_is_known(loops: Loops, begins_epoch: bool) -> None:
    """An iterator that was made before the streams were put back is not that of an epoch that begins."""
    fit_loop, epoch_loop, guessed = loops
    fit_loop.resumption = Resumption(Stage.CHECKED, nothing, nothing, begins_epoch)
    fit_loop._restarting = True
    fit_loop.epoch_progress.current.ready = 3
    fit_loop.update_restart_stage()
    assert guessed == []
    assert fit_loop.epoch_progress.current.ready == fit_loop.epoch_progress.current.completed
    assert epoch_loop._restart_stage == "restarted_on_last"
    assert fit_loop._resuming_from_checkpoint is not begins_epoch
