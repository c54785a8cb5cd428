"""Test where data and loggers go on in a trainer that another process or a checkpoint preceded."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from checkpointless.callbacks.trainer_parts import worker_iterators
from checkpointless.integrations.lightning import recoverable_strategy
from checkpointless.integrations.lightning.recoverable_strategy import _keep_loggers, _StoredPosition
from checkpointless.launcher.protocol.board import Facts
from checkpointless.observability.telemetry.events import read_events
from checkpointless.observability.telemetry.scribe import scribe

pytestmark = pytest.mark.lightning


def sampler(**options: Any) -> Any:
    counted = dict.fromkeys(
        ("init_consumed_samples", "prev_consumed_samples", "init_global_step", "if_first_step"), 0
    )
    return SimpleNamespace(**{"global_batch_size": 8, "rampup_batch_size": None, **counted, **options})


def trainer_with(data_sampler: Any, epoch: int = 0, ready: int = 0, ended: bool = False) -> Any:
    progress = SimpleNamespace(current=SimpleNamespace(ready=ready), is_last_batch=ended)
    return SimpleNamespace(
        strategy=SimpleNamespace(data_sampler=data_sampler),
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress)),
        current_epoch=epoch,
        global_step=104,
    )


@pytest.fixture
def facts() -> Facts:
    facts = Facts(None)
    _StoredPosition(trainer_with(sampler()), facts).begin(100)  # the script had loaded a checkpoint of its own
    return facts


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CHECKPOINTLESS_RUN_DIR", str(tmp_path))
    return tmp_path


def told(run_dir: Path) -> list[str]:
    assert scribe.flush()
    return [event.fields["reason"] for event in read_events(run_dir)] if (run_dir / "events.jsonl").exists() else []


def test_nemos_sampler_goes_on_behind_the_steps_that_the_checkpoint_has(facts: Facts, run_dir: Path) -> None:
    again = sampler()
    _StoredPosition(trainer_with(again), facts).resume(104)
    assert (again.init_consumed_samples, again.prev_consumed_samples, again.init_global_step) == (32, 32, 104)
    assert (again.if_first_step, told(run_dir)) == (1, [])


def test_a_data_module_that_keeps_its_position_is_let_be(facts: Facts, run_dir: Path) -> None:
    kept = sampler(init_consumed_samples=832)
    _StoredPosition(trainer_with(kept), facts).resume(104)
    assert (kept.init_consumed_samples, told(run_dir)) == (832, [])


def test_a_training_that_starts_over_has_its_data_counted_from_there(facts: Facts) -> None:
    again = sampler()
    for begun, step in ((sampler(), 0), (again, 50)):
        _StoredPosition(trainer_with(begun), facts).resume(step)
    assert again.init_consumed_samples == 400


@pytest.mark.parametrize(("ramp", "epoch"), [([4, 4, 100], 0), (None, 1)])
def test_where_the_position_does_not_follow_from_the_step_that_is_said(
    facts: Facts, run_dir: Path, ramp: list[int] | None, epoch: int
) -> None:
    made = sampler(rampup_batch_size=ramp)
    _StoredPosition(trainer_with(made, epoch=epoch), facts).resume(104)
    assert made.init_consumed_samples == 0
    (reason,) = told(run_dir)
    assert reason.startswith("the data begin anew after step 104: the checkpoint does not hold their position")


@pytest.mark.parametrize(
    ("progress", "is_said"), [({"ready": 3}, True), ({"ready": 3, "ended": True}, False), ({}, False)]
)
def test_a_loader_without_a_state_begins_anew_within_an_epoch(
    facts: Facts, run_dir: Path, progress: dict[str, Any], is_said: bool
) -> None:
    position = _StoredPosition(trainer_with(None, **progress), facts)
    position.resume(104)
    position.made([1, 2])
    position.made([1, 2])  # of the next epoch
    assert len(told(run_dir)) == is_said


def trainer_of(folder: Path, rank: int = 0) -> Any:
    return SimpleNamespace(
        loggers=[CSVLogger(str(folder), flush_logs_every_n_steps=1)], is_global_zero=rank == 0, global_step=4
    )


def test_a_successor_writes_on_in_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_EXPM_VERSION", "yesterday")
    facts, before = Facts(None), trainer_of(tmp_path)
    for step in range(3):
        before.loggers[0].log_metrics({"loss": 1.0}, step)
    _keep_loggers(before, facts, fit=2)
    assert facts.get("environment") == {"NEMO_EXPM_VERSION": "yesterday"}
    after = trainer_of(tmp_path)
    recoverable_strategy._resume_loggers(after, facts, fit=2)
    (logger,) = after.loggers
    assert logger.log_dir == before.loggers[0].log_dir
    logger.log_metrics({"loss": 2.0, "more": 1.0}, 3)
    logger.save()
    rows = Path(logger.experiment.metrics_file_path).read_text().splitlines()
    assert rows == ["loss,more,step", "1.0,,0", "1.0,,1", "1.0,,2", "2.0,1.0,3"]


def test_other_ranks_keep_nothing(tmp_path: Path) -> None:
    facts = Facts(None)
    _keep_loggers(trainer_of(tmp_path, rank=1), facts, 1)
    assert facts.get("loggers of fit 1") is None


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def loader() -> DataLoader[Any]:
    return DataLoader([torch.zeros(2)] * 4, num_workers=1, persistent_workers=True)  # type: ignore[arg-type]


@pytest.mark.usefixtures("without_collector")
def test_a_loader_whose_workers_are_seeded_is_freed_without_the_garbage_collector() -> None:
    """Collected as a part of a cycle, torch's iterator waits five seconds for each of its workers."""
    made, trainer = loader(), Mock(training=True, current_epoch=0)
    recoverable_strategy._repeat_worker_draws(made, 1, trainer, 0)
    is_freed = weakref.ref(made)
    del made
    assert is_freed() is None


def test_persistent_workers_are_found_between_two_passes() -> None:
    made = loader()
    combined = CombinedLoader(made, "sequential")
    assert worker_iterators(combined) == []
    list(combined)
    (iterator,) = worker_iterators(combined)
    assert len(iterator._workers) == 1
