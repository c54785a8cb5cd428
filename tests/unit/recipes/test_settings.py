"""Check that what is wrong with recipes and overrides is said in one line that helps."""

from pathlib import Path

import pytest

pytest.importorskip("hydra", reason="recipes need hydra-core")

from omegaconf import OmegaConf

from checkpointless.recipes import runner
from checkpointless.recipes.settings import RECIPES, RecipeError, available, load, remember, require_complete


def test_the_recipe_loads_and_overrides_apply() -> None:
    overrides = ["trainer.max_steps=7", "strategy.tensor_model_parallel_size=2", "optim.config.lr=1"]
    config = load("tiny_gpt_cpu", overrides)
    assert (config.trainer.max_steps, config.optim.lr_scheduler.max_steps) == (7, 7)
    assert config.strategy.tensor_model_parallel_size == 2


@pytest.mark.nemo
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.max_step=7", "did you mean trainer.max_steps"),
        ("trainr.max_steps=7", "no key trainr in the recipe; did you mean trainer"),
        ("trainer.max_steps.x=7", "trainer.max_steps has no keys of its own"),
        ("trainer.max_steps=ten", "trainer.max_steps must be a whole number, not 'ten'"),
        ("trainer.max_steps=1.5", "must be a whole number"),
        ("strategy.sequence_parallel=1", "must be true or false"),
        ("optim.config.lr=true", "must be a number"),
        ("trainer.max_steps=[1", "is not a YAML value"),
        ("trainer.max_steps", "write key=value"),
        ("=3", "write key=value"),
    ],
)
def test_a_wrong_override_is_one_helpful_line(override: str, message: str) -> None:
    pytest.importorskip("nemo.lightning")
    with pytest.raises(RecipeError) as error:
        load("tiny_gpt_cpu", [override])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_recipe_is_named_with_the_closest_one(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="did you mean tiny_gpt_cpu"):
        load("tiny_gtp_cpu")
    with pytest.raises(RecipeError, match=r"no recipe .*other\.yaml; recipes that come"):
        load(tmp_path / "other.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1")
    with pytest.raises(RecipeError, match="is not YAML"):
        load(broken)


def test_the_block_is_the_only_difference() -> None:
    config = load("tiny_gpt_cpu")
    assert runner.checkpointless_enabled(config)
    changed = runner._with_checkpointless(config)
    assert changed.strategy._target_ == "checkpointless.strategies.CheckpointlessMegatronStrategy"
    assert "checkpointless" in changed.callbacks
    assert config.strategy._target_ == "nemo.lightning.MegatronStrategy"
    assert not runner.checkpointless_enabled(load("tiny_gpt_cpu", ["checkpointless.enabled=false"]))
    del config.checkpointless
    assert not runner.checkpointless_enabled(config)


@pytest.mark.parametrize(
    ("ranks", "override", "message"),
    [
        (4, "strategy.tensor_model_parallel_size=3", "4 ranks cannot be cut into models of 3 ranks"),
        (1, "trainer.max_steps=1", "1 data-parallel ranks cannot hold 2 optimizer instances"),
        (4, "data.global_batch_size=12", "not a multiple of 2 x 4 ranks"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch, ranks: int, override: str, message: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with pytest.raises(RecipeError, match=message):
        runner.build(load("tiny_gpt_cpu", [override]))


def test_a_value_that_is_left_to_the_user_takes_anything() -> None:
    config = load("llama3_8b_pretrain", ["data.paths=[/data/a, /data/b]"])
    assert list(config.data.paths) == ["/data/a", "/data/b"]
    with pytest.raises(RecipeError, match=r"leaves 1 value to you: add data.tokenizer.pretrained_model_name=..."):
        require_complete(config, "llama3_8b_pretrain")
    require_complete(load("tiny_gpt_cpu"), "tiny_gpt_cpu")


@pytest.mark.parametrize("recipe", available())
def test_every_recipe_is_plain_nemo_and_one_block(recipe: str) -> None:
    config = load(recipe)
    assert set(config.checkpointless) == set(load("tiny_gpt_cpu").checkpointless)
    assert config.strategy._target_ == "nemo.lightning.MegatronStrategy"
    text = (RECIPES / f"{recipe}.yaml").read_text()
    assert "fault" not in text.replace("default", "")
    assert "\ncheckpointless:\n" in text
    del config.checkpointless
    assert "checkpointless" not in OmegaConf.to_yaml(config).replace("checkpointless.testing.demo.text", "")


def test_a_recipe_that_was_read_before_the_ranks_is_not_read_by_them(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("trainer: {max_steps: 1, max_epochs: 1}\n")
    remember(recipe)
    recipe.write_text("trainer: {max_steps: 7}\n")  # while the job runs
    assert load(recipe, ["trainer.max_epochs=2"]).trainer == {"max_steps": 1, "max_epochs": 2}
    assert load(recipe).trainer.max_steps == 7  # it is for the ranks, of which each reads it once


@pytest.mark.nemo
def test_values_that_only_the_ranks_know_keep_nothing_from_being_prepared(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "trainer: {max_steps: 1, devices: '${oc.env:A_RANKS_OWN}'}\ndata: {size: '???'}\nsize: '${data.size}'\n"
    )
    runner.before_ranks([str(recipe), "data.size=4", "trainer.devices=2"])
    recipe.unlink()
    assert load(str(recipe), ["data.size=4", "trainer.devices=2"]).size == 4
