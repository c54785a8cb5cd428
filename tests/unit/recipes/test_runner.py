"""Test what is said of a recipe whose objects cannot be made."""

from __future__ import annotations

import pytest
from omegaconf import DictConfig, OmegaConf

from checkpointless.inprocess import UnrecoverableError
from checkpointless.recipes import runner
from checkpointless.recipes.settings import RecipeError

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


def test_what_has_nothing_to_do_with_the_network_says_nothing_of_it(recipe: DictConfig) -> None:
    with pytest.raises(RecipeError, match="model: invalid literal") as raised:
        runner._make(recipe, "model")
    assert "downloads" not in str(raised.value)
