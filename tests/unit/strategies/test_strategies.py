"""Test what strategies keep for the next generation, and what a fit is given."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nemo.lightning", reason="needs NeMo")

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy

from checkpointless.callbacks import CheckpointlessCallback, HPFaultInjectionCallback, StepRecorder
from checkpointless.callbacks.external import asked_for
from checkpointless.inprocess import UnrecoverableError
from checkpointless.inprocess.finalize import CheckpointlessFinalizeCleanup
from checkpointless.integrations.lightning.recoverable_strategy import _complete
from checkpointless.state.rng import RngStates
from checkpointless.strategies import CheckpointlessModelParallelStrategy, megatron_strategy
from checkpointless.strategies.megatron_strategy import _note_given_module, _WarmStart
from checkpointless.system.environment import FAULTS_ENV, RECORD_STEPS_ENV, RUN_DIR_ENV, YES

pytestmark = pytest.mark.nemo


def test_a_callback_with_settings_stays_the_only_one() -> None:
    given = CheckpointlessCallback(enable_checksum=True)
    present: list[Any] = [given]
    for _ in range(2):
        assert (_complete(present), present) == (given, [given])


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
    assert (_complete(present), present) == (added, [users, added, *external])


@pytest.mark.usefixtures("asking")
def test_a_script_that_records_steps_itself_records_them_once() -> None:
    recorder, faults = asked_for()
    mine = StepRecorder.from_environment()
    present: list[Any] = [recorder, faults, mine]
    added = _complete(present)
    assert present == [mine, added, faults]


def test_lightnings_default_sizes_leave_no_ranks_for_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy: Any = CheckpointlessModelParallelStrategy(replicas=2)
    monkeypatch.setattr(ModelParallelStrategy, "setup_environment", lambda _: None)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    one = SimpleNamespace(size=lambda: 1)
    strategy._device_mesh = {"data_parallel": one, "tensor_parallel": one}  # one node, no sizes given
    with pytest.raises(UnrecoverableError, match="data_parallel_size=4 and tensor_parallel_size=1"):
        strategy.setup_environment()


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.nn.Linear(2, 2)
        self.norms: list[float] = []

    def configure_optimizers(self) -> Any:
        return "the class's"


def set_up(model: Model) -> None:
    """Do what NeMo's set-up does to a module."""
    model.module = torch.nn.Linear(3, 3)
    model.configure_optimizers = lambda: "the old strategy's"  # type: ignore[method-assign]
    model.register_buffer("table", torch.ones(2))
    model.norms.append(1.0)
    model.trainer = pl.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False)


def test_all_modules_of_all_fits_are_as_they_were_before_the_first_one() -> None:
    models = [Model(), Model()]
    weights = [model.kept.weight for model in models]
    for _ in range(2):
        for model in models:
            _note_given_module(model)
            set_up(model)
    CheckpointlessFinalizeCleanup()()
    for model, weight in zip(models, weights):
        assert not any(hasattr(model, name) for name in ("module", "table"))
        assert model.configure_optimizers() == "the class's"
        assert model.kept.weight is weight
        assert [name for name, _ in model.named_parameters()] == ["kept.weight", "kept.bias"]
        assert (model.norms, model._trainer) == ([1.0, 1.0], None)


# --- When a fit takes the model that was kept ---------------------------------------------------------------------


def a_kept(*what: str) -> Any:
    """Return a model that was kept and of which ``what`` holds, also as a reason."""
    return SimpleNamespace(
        streams=(RngStates.capture().without_sources(), RngStates.capture()),
        builds_together="builds together" in what,
        mismatch=lambda plans: "mismatch" if "mismatch" in what else None,
        unfit=lambda: "unfit" if "unfit" in what else None,
    )


class Job:
    """What the ranks around a fit say, and what this one tells."""

    def __init__(self) -> None:
        self.obstacle: str | None = None
        self.everyone = True
        self.told: list[Mapping[str, Any]] = []

    def is_warm(self, kept: Any) -> bool:
        """Set up the fit after the first one of the block, for which a model was kept; return if it is taken."""
        strategy: Any = SimpleNamespace(lightning_module=SimpleNamespace())
        start = _WarmStart(strategy)
        manager: Any = SimpleNamespace(kept=(1, kept), fits=SimpleNamespace(number=0))
        start.agree(manager)
        assert (manager.kept is not None) == start.is_warm
        return start.is_warm


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    made = Job()
    random.seed(3)
    monkeypatch.setattr(megatron_strategy, "_obstacle", lambda strategy: made.obstacle)
    monkeypatch.setattr(megatron_strategy, "_plans", lambda strategy: {})
    monkeypatch.setattr(megatron_strategy, "true_on_all", lambda mine: mine and made.everyone)
    monkeypatch.setattr(megatron_strategy, "emit_event", lambda name, **fields: made.told.append(fields))
    return made


def test_ranks_that_build_together_do_so_if_one_does(job: Job) -> None:
    assert job.is_warm(a_kept("builds together"))
    job.everyone = False
    assert not job.is_warm(a_kept("builds together"))
    assert "another rank builds its model" in job.told[0]["reason"]


@pytest.mark.parametrize("why", ["mismatch", "unfit", "obstacle"])
def test_what_is_not_the_same_or_cannot_be_given_is_built_anew(job: Job, why: str) -> None:
    job.obstacle = why if why == "obstacle" else None
    assert not job.is_warm(a_kept(why))
    assert job.told == [{"kept": False, "reason": why}]


@pytest.mark.parametrize("draw", [random.random, lambda: torch.rand(1)], ids=["python", "torch"])
def test_other_random_numbers_before_a_model_is_built_give_another_model(job: Job, draw: Any) -> None:
    kept = a_kept()
    draw()
    assert not job.is_warm(kept)
    assert job.told == [{"kept": False, "reason": "random numbers were drawn otherwise before"}]


def test_a_module_that_another_thread_copies_meanwhile_is_none_of_the_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from nemo.lightning import io

    start: Any = object.__new__(_WarmStart)
    start._obstacle, start._kept = None, None
    monkeypatch.setattr(io, "reinit", lambda module: SimpleNamespace(of=module))
    with start._stages(), ThreadPoolExecutor(1) as pool:
        mine, others = io.reinit("mine"), pool.submit(io.reinit, "others").result()
    assert (mine.of, others.of) == ("mine", "others")
    assert [hasattr(each, "configure_model") for each in (mine, others)] == [True, False]
