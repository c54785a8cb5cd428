"""Test the parts of the integration of Megatron-Bridge that need no ranks."""

from __future__ import annotations

import itertools
import queue
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import tests.bridge.imported  # noqa: F401 - before what follows

# isort: split
import pytest
import torch
from megatron.bridge.data.loaders import cyclic_iter
from megatron.bridge.data.samplers import build_pretraining_data_loader
from megatron.bridge.training import pretrain, train
from megatron.core import parallel_state

from checkpointless.inprocess import UnrecoverableError
from checkpointless.integrations.compat.megatron import queues_of_writers
from checkpointless.integrations.megatron import pretraining
from checkpointless.integrations.megatron.pretrain_loaders import Loaders
from checkpointless.integrations.megatron_bridge import _Bridge, _copied, _value, finetune

pytestmark = [pytest.mark.nemo]

SAMPLES, GLOBAL, RANKS = 22, 4, 2


@pytest.fixture(autouse=True)
def _rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda: 1)


def made(kind: str, consumed: int, workers: int = 0, drop_last: bool = True) -> Any:
    return build_pretraining_data_loader(
        *(torch.arange(SAMPLES), consumed, kind, 1, workers, True),
        data_parallel_rank=1,
        data_parallel_size=RANKS,
        global_batch_size=GLOBAL,
        pin_memory=False,
        persistent_workers=workers > 0,
        drop_last=drop_last,
    )


@pytest.mark.parametrize("began", [0, 8])
@pytest.mark.parametrize(("kind", "drop_last"), [("cyclic", True), ("batch", True), ("batch", False)])
def test_a_pass_goes_on_where_it_stood_wherever_that_was(kind: str, drop_last: bool, began: int) -> None:
    """Bridge alone is right as long as it does not resume. Without ``drop_last`` the last batch is filled up."""
    size = RANKS if kind == "cyclic" else GLOBAL  # samples of all ranks in one batch of the loader
    expected = [each.tolist() for each in itertools.islice(cyclic_iter(made(kind, began, 0, drop_last)), 40)]
    for taken in range(30):
        loaders = Loaders(True, {"train": began}, seed=1)
        loader = made(kind, began + taken * size, 0, drop_last)
        loaders.made([loader, None, None])
        found = [batch.tolist() for batch in itertools.islice(loaders.passes(loader), 10)]
        assert found == expected[taken : taken + 10], f"after {taken} batches"


@pytest.mark.parametrize("kind", ["cyclic", "batch"])
def test_an_iterator_that_was_there_before_the_fault_draws_at_once_and_others_when_they_begin(kind: str) -> None:
    """Torch draws a number from the training's stream when an iterator is made."""
    each = RANKS if kind == "cyclic" else GLOBAL
    length = (SAMPLES // GLOBAL * GLOBAL if kind == "batch" else SAMPLES // RANKS * RANKS) // each
    for resumes, taken in itertools.product((False, True), range(length + 2)):
        loaders = Loaders(resumes, {"train": 0}, seed=1)
        loader = made(kind, taken * each)
        loaders.made([loader, None, None])
        before = torch.get_rng_state()
        loaders.passes(loader)
        drawn = not torch.equal(before, torch.get_rng_state())
        assert drawn == (resumes and taken % length > 0)


@pytest.mark.parametrize(("consumed", "draws"), [(0, False), (SAMPLES, True)])
def test_workers_that_persist_have_one_iterator_for_all_passes(consumed: int, draws: bool) -> None:
    loaders = Loaders(True, {"train": 0}, seed=1)
    loader = made("cyclic", consumed, workers=1)
    loaders.made([loader, None, None])
    before = torch.get_rng_state()
    passes = loaders.passes(loader)
    assert draws != torch.equal(before, torch.get_rng_state())
    assert next(iter(passes)).tolist() == next(cyclic_iter(made("cyclic", consumed))).tolist()


def test_workers_draw_in_a_later_pass_what_they_would_without_the_fault() -> None:
    def draws(resumes: bool, taken: int, count: int) -> list[float]:
        loaders = Loaders(resumes, {"train": 0}, seed=1)
        loader = made("cyclic", taken * RANKS, workers=1)
        loader.collate_fn = lambda _: torch.rand(1)
        loaders.made([loader, None, None])
        return [float(each) for each in itertools.islice(loaders.passes(loader), count)]

    assert draws(True, taken=13, count=3) == draws(False, taken=0, count=16)[13:]


REFUSED = {
    "dataset.dataloader_type": "external",
    "train.iterations_to_skip": [3],
    "optimizer.optimizer": "muon",
    "rerun_state_machine.rerun_mode": "report_determinism_stats",
    "rerun_state_machine.error_injection_rate": 1000,
}
ALLOWED: dict[str, object] = {
    "dataset.dataloader_type": "cyclic",
    "train.iterations_to_skip": [],
    "optimizer.optimizer": "adam",
    "rerun_state_machine.rerun_mode": "validate_results",
    "model.moe_expert_rank_capacity_factor": None,
    "peft": None,
}


def refusal(setting: str, value: object) -> str | None:
    for name in reversed(setting.split(".")):
        value = SimpleNamespace(**{name: value})
    return _Bridge.refusal(partial(_value, value))


@pytest.mark.parametrize("setting", [each.setting for each in _Bridge.refusals])
def test_what_cannot_be_carried_is_refused_in_one_line(setting: str) -> None:
    reason = refusal(setting, REFUSED.get(setting, True)) or ""
    assert re.fullmatch(rf"{re.escape(setting)}: checkpointless .*: set .*", reason)
    assert refusal(setting, ALLOWED.get(setting, False)) is None
    assert refusal(setting.partition(".")[0], None) is None


@dataclass
class Section:
    size: int | None = None
    hooks: list[str] = field(default_factory=list)


@dataclass
class Configuration:
    model: Section
    peft: Section | None = None


def test_what_bridge_writes_into_its_configuration_is_not_there_at_the_next_entry() -> None:
    config = Configuration(Section())
    copied: Any = _copied(config)  # type: ignore[arg-type]
    copied.model.size = 128
    copied.model.hooks.append("a hook")
    assert config == Configuration(Section())


def test_finetune_begins_with_a_checkpoint() -> None:
    config: Any = SimpleNamespace(checkpoint=SimpleNamespace(pretrained_checkpoint=None, load=None))
    with pytest.raises(ValueError, match=r"checkpoint\.pretrained_checkpoint or checkpoint\.load"):
        finetune(config, lambda: None)


@pytest.fixture
def generation() -> Iterator[_Bridge]:
    call: Any = SimpleNamespace()
    yield _Bridge(call, {})
    _Bridge.patches.undo()


def test_the_writers_of_a_save_report_to_this_process_in_a_block(generation: _Bridge) -> None:
    with generation.entered():
        made = [getattr(module, name)() for module, name in queues_of_writers()]
    assert made
    assert all(type(each) is queue.Queue for each in made)


def test_a_version_without_a_seam_is_refused(generation: _Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(train, "train_step")
    seam = r"^this Megatron-Bridge: there is no megatron\.bridge\.training\.train\.train_step, without"
    with pytest.raises(UnrecoverableError, match=seam), generation.entered():
        pass


def test_outside_of_a_block_bridge_is_its_own(generation: _Bridge) -> None:
    originals = pretrain.train, train.train_step
    with generation.entered():
        assert train.train_step is not originals[1]
        assert pretraining._running == [generation]
    assert pretraining._running == []
    with pytest.raises(TypeError, match="forward_step_func"):
        train.train_step()  # Bridge's own, which misses its arguments
    generation.patches.undo()
    assert (pretrain.train, train.train_step) == originals


def test_an_abort_finds_workers_after_the_block(generation: _Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch waits five seconds for each worker that is left to the garbage collector."""
    monkeypatch.setattr(generation, "workers", lambda: ["an iterator with workers"])
    found = pretraining._Parts().loader_iterators
    with pytest.raises(KeyError), generation.entered():
        raise KeyError
    assert found(None) == generation.workers()
    with generation.entered():
        assert found(None) == generation.workers()
    assert found(None) == []
