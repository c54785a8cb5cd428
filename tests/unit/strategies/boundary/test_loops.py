"""Test that Lightning's loops go on where they stood, and that what is taken of a trainer is what it had then."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loops import _TrainingEpochLoop
from lightning.pytorch.plugins import Precision

from checkpointless.integrations.lightning.boundary.loops import make_resumable
from checkpointless.integrations.lightning.boundary.step_keeper import _load_again, _of_save_hooks, take_state
from checkpointless.state.port import SnapshotPoint

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


def nothing(*_: object) -> None: ...


@pytest.mark.parametrize("is_recovered", [True, False])
def test_schedulers_step_at_the_end_of_an_epoch_that_was_resumed_as_at_any(
    loops: Loops, monkeypatch: pytest.MonkeyPatch, is_recovered: bool
) -> None:
    """Restarted from a checkpoint, Lightning steps those again that need no metric, and no others."""
    fit_loop, epoch_loop, _ = loops
    monkeypatch.setattr(pl.loops._FitLoop, "on_advance_start", nothing)
    if is_recovered:
        fit_loop.resumption = SimpleNamespace(stage=SnapshotPoint.CHECKED)
    fit_loop._restarting = True
    fit_loop.on_advance_start()
    assert fit_loop.restarting is not is_recovered
    assert (epoch_loop.resumption is not None) is is_recovered


@pytest.mark.parametrize("begins_epoch", [False, True])
def test_where_it_resumes_is_known(loops: Loops, begins_epoch: bool) -> None:
    """An iterator that was made before the streams were put back is not that of an epoch that begins."""
    fit_loop, epoch_loop, guessed = loops
    fit_loop.resumption = SimpleNamespace(stage=SnapshotPoint.CHECKED, begins_epoch=begins_epoch)
    fit_loop._restarting = True
    fit_loop.epoch_progress.current.ready = 3
    fit_loop.update_restart_stage()
    assert guessed == []
    assert fit_loop.epoch_progress.current.ready == fit_loop.epoch_progress.current.completed
    assert epoch_loop._restart_stage == "restarted_on_last"
    assert fit_loop._resuming_from_checkpoint is not begins_epoch


class Watches(pl.Callback):
    """Is also the observer of the loops."""

    def __init__(self) -> None:
        self.validated: list[tuple[int, int]] = []

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        counted = trainer.fit_loop.epoch_loop.val_loop.batch_progress.current.ready
        self.validated.append((trainer.global_step, counted))

    reached = before_fetch = epoch_begins = data_is_set_up = nothing


def test_a_validation_that_a_checkpoint_precedes_has_all_batches(tmp_path: Path) -> None:
    """Stock Lightning begins behind those of the one before, and NeMo's stages would wait for each other."""

    def fit(folder: str, checkpoint: Path | None = None) -> list[tuple[int, int]]:
        watches = Watches()
        saves = ModelCheckpoint(tmp_path / folder, "{step}", every_n_train_steps=2, save_top_k=-1)
        limits: dict[str, Any] = {"max_steps": 6, "limit_val_batches": 3, "num_sanity_val_steps": 0}
        limits |= {"val_check_interval": 2, "check_val_every_n_epoch": None}
        silent: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = pl.Trainer(accelerator="cpu", callbacks=[watches, saves], **limits, **silent)
        make_resumable(trainer, watches)
        trainer.fit(BoringModel(), ckpt_path=checkpoint)
        return watches.validated

    assert fit("first") == [(2, 3), (4, 3), (6, 3)]
    # Lightning 2.6 guesses where it resumes, and goes on with the next step.
    due = [] if hasattr(_TrainingEpochLoop, "update_restart_stage") else [(4, 3)]
    assert fit("second", tmp_path / "first" / "step=4.ckpt") == [*due, (6, 3)]


def test_a_step_that_lightning_makes_instead_of_a_validation_is_ended(
    loops: Loops, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning 2.6 makes no validation that precedes the first step of a fit from a checkpoint."""
    _, epoch_loop, _ = loops
    ended: list[SnapshotPoint] = []

    def trains(loop: Any, data_fetcher: object) -> None:
        loop.batch_progress.increment_ready()

    monkeypatch.setattr(_TrainingEpochLoop, "advance", trains)
    for name, said in (("_should_check_val_fx", True), ("_should_accumulate", False)):
        monkeypatch.setattr(epoch_loop, name, lambda *_, said=said: said)
    epoch_loop.observer = SimpleNamespace(reached=ended.append)
    epoch_loop.restarting = True
    epoch_loop.advance(None)
    assert ended == [SnapshotPoint.ENDED]


# --- What is taken of a trainer is what Lightning's loops, callbacks and schedulers had then ----------------------


class Owns(Callback):
    def __init__(self) -> None:
        self.seen: dict[str, int] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.seen

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = dict(state_dict)


def trainer_with(**options: Any) -> Any:
    silent: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer: Any = pl.Trainer(accelerator="cpu", **silent, **options)
    trainer.fit_loop.val_made, trainer.fit_loop.made_at_step = None, 0  # as resumable loops have
    return trainer


def test_a_callback_whose_state_was_empty_is_emptied_again() -> None:
    """Lightning gives an empty state to no callback, so that what hooks at the start had put in would stay."""
    trainer = trainer_with(max_steps=2, limit_val_batches=0, callbacks=[callback := Owns()])
    trainer.fit(BoringModel(), torch.utils.data.DataLoader(RandomDataset(32, 4)))
    checkpoint = take_state(trainer)()["checkpoint"]
    callback.seen["n"] = 1
    _load_again(trainer, checkpoint)
    assert callback.seen == {}


class Compares(Callback):
    """Takes the state in every hook in which a step or an epoch begins or ends."""

    def __init__(self) -> None:
        self.taken: list[tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = []

    def take(self, trainer: Any, *_: Any, **__: Any) -> None:
        self.taken.append((copy.deepcopy(trainer.fit_loop.state_dict()), take_state(trainer)))

    on_train_start = on_train_batch_start = on_train_batch_end = on_train_epoch_end = take
    on_validation_batch_end = on_validation_end = on_before_zero_grad = on_train_end = take


class Stateful:
    """A loader that counts what it has delivered."""

    def __init__(self) -> None:
        self.state = {"delivered": [0]}

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(3):
            self.state["delivered"][0] += 1
            yield torch.ones(2, 32)

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def fitted_with(loader: Any) -> tuple[pl.Trainer, Compares]:
    compares = Compares()
    trainer = trainer_with(max_epochs=2, accumulate_grad_batches=2, callbacks=[compares])
    trainer.fit(BoringModel(), loader, torch.utils.data.DataLoader(RandomDataset(32, 4)))
    return trainer, compares


@pytest.mark.parametrize("make", [lambda: torch.utils.data.DataLoader(RandomDataset(32, 5)), Stateful])
def test_every_moment_is_as_lightning_has_it_and_stays(make: Callable[[], Any]) -> None:
    _, compares = fitted_with(make())
    assert len(compares.taken) > 20
    assert len({str(theirs) for theirs, _ in compares.taken}) > 10
    for theirs, mine in compares.taken:
        loops = mine()["checkpoint"]["loops"]  # made when the fitted_with is over
        assert loops == {"fit_loop": theirs} or (
            loops is None and theirs["epoch_progress"]["current"]["ready"] == 0
        )


def test_a_checkpoint_has_what_callbacks_and_schedulers_had_when_it_was_taken() -> None:
    class Counts(Callback):
        state = {"seen": [1]}

        def state_dict(self) -> dict[str, Any]:
            return self.state

    trainer, _ = fitted_with(torch.utils.data.DataLoader(RandomDataset(32, 5)))
    counts = Counts()
    trainer.callbacks.append(counts)  # type: ignore[attr-defined]
    (schedule,) = [config.scheduler for config in trainer.lr_scheduler_configs]
    rates = list(schedule.state_dict()["_last_lr"])
    taken = take_state(trainer)
    counts.state["seen"].append(2)
    schedule.state_dict()["_last_lr"][0] = 99.0
    trainer.fit_loop.epoch_progress.total.completed = 55
    checkpoint = taken()["checkpoint"]
    assert checkpoint["callbacks"] == {counts.state_key: {"seen": [1]}}
    assert checkpoint["lr_schedulers"][0]["_last_lr"] == rates
    assert checkpoint["loops"]["fit_loop"]["epoch_progress"]["total"]["completed"] == 2
    assert (checkpoint["epoch"], checkpoint["global_step"]) == (2, 6)
    assert (checkpoint["state_dict"], checkpoint["optimizer_states"]) == ({}, [])


class Adds:
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["added"] = 1


class AddingModule(Adds, pl.LightningModule): ...


class AddingData(Adds, pl.LightningDataModule): ...


@pytest.mark.parametrize(
    ("module", "data", "found"),
    [
        (AddingModule(), None, {"added": 1}),
        (AddingModule(), AddingData(), {"added": 1}),
        (pl.LightningModule(), AddingData(), {}),
        (pl.LightningModule(), pl.LightningDataModule(), {}),
    ],
    ids=["module", "both", "data", "nobody"],
)
def test_of_a_checkpoint_what_save_hooks_have_added_is_known(module: Any, data: Any, found: dict[str, Any]) -> None:
    """Lightning's own parts are none of theirs, nor the states of precision plugin and data module.

    Of a data module, Lightning asks ``state_dict`` alone, so that a method of such a name means nothing.
    """
    trainer: Any = SimpleNamespace(
        lightning_module=module, datamodule=data, callbacks=[pl.Callback()], precision_plugin=Precision()
    )
    parts = ("epoch", "global_step", "pytorch-lightning_version", "state_dict", "optimizer_states", "loops")
    own = ("callbacks", "lr_schedulers", "Precision", type(data).__qualname__)
    checkpoint = {**dict.fromkeys((*parts, *own), 0), "added": 1}
    assert _of_save_hooks(trainer, checkpoint) == found
