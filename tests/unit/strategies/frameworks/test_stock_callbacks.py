"""Test which of Lightning's own callbacks are refused, and that the others are not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import callbacks as stock

from checkpointless.inprocess import UnrecoverableError
from checkpointless.integrations.lightning.recoverable_strategy import refuse_unfit

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
        refuse_unfit([stock.Callback(), UNFIT[name]()])


def test_the_averages_of_newer_versions_are_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("WeightAveraging", (stock.Callback,), {})
    monkeypatch.setattr(stock, "WeightAveraging", kind, raising=False)
    with pytest.raises(UnrecoverableError, match=r"EMAWeightAveraging exchanges weights in hooks.*AveragedModel"):
        refuse_unfit([type("EMAWeightAveraging", (kind,), {})()])


def test_every_other_callback_of_lightnings_is_let_pass() -> None:
    others = [getattr(stock, name) for name in stock.__all__ if name not in UNFIT and name != "WeightAveraging"]
    assert len(others) > 10
    refuse_unfit([object.__new__(each) for each in others if not issubclass(each, _averages())])


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


def _averages() -> Any:
    return getattr(stock, "WeightAveraging", ())
