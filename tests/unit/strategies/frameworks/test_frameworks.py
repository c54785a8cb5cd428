"""Test what frameworks keep over a restart, and which of Lightning's own callbacks are refused."""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("nemo.lightning", reason="needs NeMo")

from lightning.pytorch import callbacks as stock

from checkpointless.inprocess import UnrecoverableError
from checkpointless.integrations.lightning.frameworks import nemo
from checkpointless.integrations.lightning.recoverable_strategy import _refuse_unfit

pytestmark = pytest.mark.nemo

ROOT = Path(__file__).parents[4]
BASES = {"Callback", "Checkpoint", "ProgressBar"}

UNFIT: dict[str, Any] = {
    "StochasticWeightAveraging": lambda: stock.StochasticWeightAveraging(1e-2),
    "ModelPruning": lambda: stock.ModelPruning("l1_unstructured", amount=0.1),
    "SpikeDetection": stock.SpikeDetection,
    "BackboneFinetuning": stock.BackboneFinetuning,
    "BaseFinetuning": stock.BaseFinetuning,
    "LearningRateFinder": stock.LearningRateFinder,
    "BatchSizeFinder": stock.BatchSizeFinder,
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_is_refused_is_named_with_what_to_do(name: str) -> None:
    with pytest.raises(UnrecoverableError, match=f"^{name} .*: "):
        _refuse_unfit([stock.Callback(), UNFIT[name]()])


def test_the_averages_of_newer_versions_are_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("WeightAveraging", (stock.Callback,), {})
    monkeypatch.setattr(stock, "WeightAveraging", kind, raising=False)
    with pytest.raises(UnrecoverableError, match=r"EMAWeightAveraging exchanges weights in hooks.*AveragedModel"):
        _refuse_unfit([type("EMAWeightAveraging", (kind,), {})()])


def test_every_other_callback_of_lightnings_is_let_pass() -> None:
    others = [getattr(stock, name) for name in stock.__all__ if name not in UNFIT and name != "WeightAveraging"]
    assert len(others) > 10
    averages = getattr(stock, "WeightAveraging", ())
    _refuse_unfit([object.__new__(each) for each in others if not issubclass(each, averages)])


def test_the_documented_table_has_every_callback_and_each_is_run_or_refused() -> None:
    text = (ROOT / "docs" / "lightning.md").read_text()
    documented = {
        name: outcome
        for names, outcome in re.findall(r"^\| (`[A-Z]\w+`[^|]*) \| (\w[\w ]*) \|", text, re.M)
        for name in re.findall(r"`(\w+)`", names)
    }
    assert {*stock.__all__} - BASES - documented.keys() == set()
    refused = {name for name, outcome in documented.items() if outcome == "refused"}
    assert refused - UNFIT.keys() == {"WeightAveraging", "EMAWeightAveraging"}  # of newer versions, see above
    script = (ROOT / "tests" / "ranks" / "agent_scripts" / "lightning_fit.py").read_text()
    run = {"ModelCheckpoint", *re.findall(r"\bstock\.(\w+)", script)}  # the former by a class of the script's
    assert documented.keys() - refused - run == set()


def test_the_log_files_of_a_trainer_are_closed_and_the_users_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo.utils import lightning_logger_patch
    from nemo.utils import logging as nemo_logging
    from nemo.utils.mcore_logger import add_handlers_to_mcore_logger

    monkeypatch.setattr(nemo, "_installed", [])
    monkeypatch.setattr(nemo, "_of_the_user", set())
    monkeypatch.setattr(nemo_logging, "_handlers", dict(nemo_logging._handlers))
    megatrons = logging.getLogger("megatron.core")
    lightnings = lightning_logger_patch.pl._logger
    monkeypatch.setattr(lightning_logger_patch, "HANDLERS", {})
    before = {each: list(each.handlers) for each in (nemo_logging._logger, megatrons, lightnings)}
    try:
        nemo_logging.add_file_handler(tmp_path / "users.txt")
        nemo.install()
        opened = []
        for generation in range(3):
            nemo_logging.add_file_handler(tmp_path / f"{generation}.txt")
            nemo_logging.add_err_file_handler(tmp_path / f"{generation}-errors.txt")
            add_handlers_to_mcore_logger()
            lightning_logger_patch.add_filehandlers_to_pl_logger(tmp_path / "all.txt", tmp_path / "errors.txt")
            opened += [*lightning_logger_patch.HANDLERS.values()]
            opened += [nemo_logging._handlers["file"], nemo_logging._handlers["file_err"]]
            nemo_logging.warning("generation %d", generation)
            nemo._close_log_files()
        nemo_logging.warning("and on")
        left = [each for logger in before for each in logger.handlers if isinstance(each, logging.FileHandler)]
        assert not set(left) & set(opened)
        assert [each.stream for each in opened] == [None] * 12, "closed"
        text = (tmp_path / "users.txt").read_text()
        assert all(each in text for each in ("generation 2", "and on"))
        assert (tmp_path / "0-errors.txt").read_text().count("generation") == 1, "no later one writes there"
    finally:
        for logger, handlers in before.items():
            for each in set(logger.handlers) - set(handlers):
                logger.removeHandler(each)
                each.close()


# --- The cache of Megatron's datasets, with Megatron's own builder, and other ranks that are made up --------------


class Tokenizer:
    def __init__(self, path: str = "a", eod: int = 3) -> None:
        self.path = path
        self.eod = self.pad = eod
        self.unique_identifiers = OrderedDict({"class": "Tokenizer"})
        self.vocab_size = 16


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    call = Mock(generation=0)
    monkeypatch.setattr(nemo, "active_call_wrapper", lambda: call)
    monkeypatch.setattr(nemo, "true_on_all", lambda mine: mine)
    monkeypatch.setattr(nemo, "emit_event", lambda *_, **__: None)
    nemo.cache_megatron_datasets()
    yield call
    nemo._patches.undo()


def build(size: int = 8, tokenizer: Any = None, seed: int = 1) -> list[Any]:
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset

    switched_off = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False)
    config = GPTDatasetConfig(
        random_seed=seed, sequence_length=16, split="8,1,1", tokenizer=tokenizer or Tokenizer(), **switched_off
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, [size, 2, 2], lambda: True, config).build()


def test_equal_arguments_give_what_was_built_before_the_fault(call: Any) -> None:
    first = build()
    for call.generation in (1, 2):
        assert [id(each) for each in build()] == [id(each) for each in first]


@pytest.mark.parametrize(
    "other",
    [{"size": 9}, {"seed": 2}, {"tokenizer": Tokenizer("b")}, {"tokenizer": Tokenizer(eod=4)}],
    ids=["size", "seed", "path", "eod"],
)
def test_other_arguments_are_built(call: Any, other: dict[str, Any]) -> None:
    first = build()
    call.generation = 1
    assert build(**other)[0] is not first[0]
    assert build()[0] is first[0], "the entry before is kept, in whatever order the function builds"


def test_all_build_if_one_rank_is_new(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build()
    call.generation = 1
    monkeypatch.setattr(nemo, "true_on_all", lambda mine: False)
    assert build()[0] is not first[0]


def test_a_tokenizer_that_says_nothing_of_itself_is_another_one(call: Any) -> None:
    class Local(Tokenizer): ...

    first = build(tokenizer=(tokenizer := Local()))
    call.generation = 1
    assert build(tokenizer=tokenizer)[0] is not first[0], "its class cannot be told from another one"
