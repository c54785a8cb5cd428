"""Test what is said of a recipe whose objects cannot be made."""

from __future__ import annotations

import pytest
from omegaconf import DictConfig, OmegaConf

from checkpointless.inprocess import UnrecoverableError
from checkpointless.recipes import runner
from checkpointless.recipes.checks import check, layout_of
from checkpointless.recipes.runner import make
from checkpointless.recipes.settings import RecipeError, load

pytestmark = pytest.mark.nemo


@pytest.fixture
def recipe() -> DictConfig:
    """Return a recipe whose tokenizer would be downloaded, and whose model wants what is not installed."""
    config = OmegaConf.create(
        {
            "data": {"_target_": "urllib.request.urlopen", "url": "http://127.0.0.1:1/vocabulary"},
            "model": {"_target_": "builtins.int", "_args_": ["no number"]},
        }
    )
    assert isinstance(config, DictConfig)
    return config


def test_what_cannot_be_made_at_the_start_is_no_fault(recipe: DictConfig) -> None:
    recipe.data = recipe.model
    with pytest.raises(UnrecoverableError, match="data: invalid literal"):
        runner._fit_if_it_can_be_made(recipe, generation=0)
    with pytest.raises(RecipeError, match="data: "):  # after a fault it may be: a disk that was lost
        runner._fit_if_it_can_be_made(recipe, generation=1)


def test_a_network_that_fails_may_work_the_next_time(recipe: DictConfig) -> None:
    with pytest.raises(RecipeError, match=r"data: .*refused.*name one that is here"):
        runner._fit_if_it_can_be_made(recipe, generation=0)


def test_a_callback_that_is_null_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load("tiny_gpt_cpu", ["callbacks.one={_target_: builtins.dict, x: 1}", "callbacks.two=null"])
    monkeypatch.setattr(runner, "make", lambda config, key, **given: given or _object_of(config, key))
    assert runner._objects(config).trainer["callbacks"] == [{"x": 1}]  # type: ignore[index]


def _object_of(config: DictConfig, key: str) -> object:
    """Make callbacks alone: the rest needs NeMo's model."""
    if key.startswith("callbacks"):
        return make(config, key)
    return OmegaConf.create({"tokenizer": 1}) if key == "data" else None


def test_a_list_of_callbacks_is_refused_in_a_line() -> None:
    config = load("tiny_gpt_cpu")
    config.callbacks = [{"_target_": "builtins.object"}]
    with pytest.raises(RecipeError, match="callbacks has a name for each callback"):
        check(config, layout_of(config))
