"""Test what is imported once for all ranks of a recipe: what a new rank imports, the others wait for."""

from pathlib import Path

import pytest

pytest.importorskip("hydra", reason="recipes need hydra-core")

from omegaconf import OmegaConf

from checkpointless.recipes.settings import RECIPE_PRELOAD, preloads_of


def test_what_a_recipe_names_is_preloaded_unless_it_is_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("raise RuntimeError('local modules are not for the zygote')")
    monkeypatch.chdir(tmp_path)
    callbacks = [{"_target_": "mine.Clock"}, {"_target_": "torch.nn.Linear", "path": "torch.data"}]
    config = OmegaConf.create(
        {
            "model": {"config": {"spec": {"_target_": "hydra.utils.get_method", "path": "json.dumps"}}},
            "c": callbacks,
        }
    )
    assert preloads_of(config) == (*RECIPE_PRELOAD, "hydra.utils.get_method", "torch.nn.Linear")
