"""Recipes and overrides: what is wrong with them is said in one line that helps."""

from pathlib import Path

import pytest

pytest.importorskip("hydra", reason="recipes need hydra-core")

from checkpointless.recipes import runner
from checkpointless.recipes.settings import RecipeError, load


def test_the_recipe_loads_and_overrides_apply() -> None:
    config = load(
        "tiny_gpt_cpu", ["trainer.max_steps=7", "strategy.tensor_model_parallel_size=2", "optim.config.lr=1"]
    )
    assert config.trainer.max_steps == 7
    assert config.optim.lr_scheduler.max_steps == 7
    assert config.strategy.tensor_model_parallel_size == 2


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
    changed = runner.with_checkpointless(config)
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


def test_main_ends_in_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["no_such_recipe"]) == 2
    assert runner.main([]) == 2
    assert capsys.readouterr().err.count("\n") == 2
