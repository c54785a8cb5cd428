"""What a recipe asks of the machine is checked before anything starts, and said in one line."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

pytest.importorskip("hydra", reason="recipes need hydra-core")

from checkpointless.recipes import checks
from checkpointless.recipes.checks import layout_of
from checkpointless.recipes.settings import RecipeError, available, load

pytestmark = pytest.mark.nemo

EVERYTHING = ("transformer_engine", "apex", "grouped_gemm")
DEFAULT_LAYERS = "model.config.transformer_layer_spec=null"
OFF = "checkpointless.enabled=false"


Check = Callable[..., None]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Check:
    def check(installed: Sequence[str], *overrides: str, recipe: str = "tiny_gpt_cpu") -> None:
        monkeypatch.setattr(checks, "installed", lambda package: package in installed)
        config = load(recipe, overrides)
        checks.check_requirements(config, layout_of(config))

    return check


@pytest.mark.parametrize(
    ("overrides", "says", "enough"),
    [
        (
            ["strategy.context_parallel_size=2", DEFAULT_LAYERS],
            "context parallelism needs TransformerEngine: set strategy.context_parallel_size=1",
            "transformer_engine",
        ),
        (
            ["strategy.tensor_model_parallel_size=2", "strategy.sequence_parallel=true", DEFAULT_LAYERS],
            "sequence parallelism needs TransformerEngine or apex: set strategy.sequence_parallel=false",
            "transformer_engine",
        ),
        (
            ["strategy.tensor_model_parallel_size=2", "strategy.sequence_parallel=true"],
            "sequence parallelism needs TransformerEngine or apex",
            "apex",
        ),
        (
            ["model.config.num_moe_experts=4", "model.config.moe_grouped_gemm=true"],
            "the grouped GEMM needs TransformerEngine or grouped_gemm: set model.config.moe_grouped_gemm=false",
            "grouped_gemm",
        ),
        (
            ["optim.config.use_precision_aware_optimizer=true"],
            "the precision-aware optimizer needs TransformerEngine",
            "transformer_engine",
        ),
        (["optim.config.optimizer_cpu_offload=true", OFF], "can be offloaded to the CPU from GPUs only", None),
        (
            ["optim.config.optimizer_cpu_offload=true", "trainer.accelerator=gpu"],
            "checkpointless cannot take along what an optimizer that is offloaded to the CPU keeps for itself",
            None,
        ),
    ],
)
def test_what_is_missing_is_said_in_one_line(
    check: Check, overrides: list[str], says: str, enough: str | None
) -> None:
    with pytest.raises(RecipeError, match=says) as refused:
        check((), *overrides)
    assert "\n" not in str(refused.value)
    if enough is not None:
        check((enough,), *overrides)
    else:
        with pytest.raises(RecipeError, match=says):
            check(EVERYTHING, *overrides)


def test_megatrons_own_layers_have_no_context_parallelism_whatever_is_installed(check: Check) -> None:
    with pytest.raises(RecipeError, match="context parallelism"):
        check(EVERYTHING, "strategy.context_parallel_size=2")


def test_layers_of_ones_own_are_trusted(check: Check) -> None:
    own = "model.config.transformer_layer_spec={_target_: hydra.utils.get_method, path: mine.layers}"
    check((), "strategy.context_parallel_size=2", own)


@pytest.mark.parametrize("recipe", [recipe for recipe in available() if recipe.startswith("tiny_")])
def test_the_recipes_for_the_cpu_need_nothing(check: Check, recipe: str) -> None:
    check((), recipe=recipe)


@pytest.mark.parametrize("recipe", available())
def test_with_everything_installed_every_recipe_can_be_trained(check: Check, recipe: str) -> None:
    check(EVERYTHING, recipe=recipe)
