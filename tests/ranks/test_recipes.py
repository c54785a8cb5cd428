"""Test the recipes on real NeMo and Megatron: names, parameters at the real size, and that they train."""

from collections.abc import Callable
from functools import cache

import pytest

from checkpointless.observability.report.incidents import Outcome
from checkpointless.recipes.checks import layout_of
from checkpointless.recipes.settings import available, load
from tests.ranks.jobs import RUNNER, TrainingsOf
from tests.ranks.nemo_zygote import Zygote

pytestmark = [pytest.mark.ranks, pytest.mark.nemo]

# Hugging Face's model pages (8.03 B, 70.6 B) and OpenAI's model card of gpt-oss (116.83 B) publish these.
PUBLISHED = {
    "llama3_8b_pretrain": 8_030_261_248,
    "llama3_70b_pretrain": 70_553_706_496,
    "gpt_oss_120b_full": 116_829_156_672,
}
TINY = [recipe for recipe in available() if recipe.startswith("tiny_")]


Stages = Callable[[str], list[tuple[int, int, int]]]


@pytest.fixture(scope="module")
def stages(nemo_zygote: Zygote) -> Stages:
    """Return a function that counts the parameters of every stage of a recipe, each recipe once."""

    @cache
    def count(recipe: str) -> list[tuple[int, int, int]]:
        (answer,) = nemo_zygote.run(1, "tests.ranks.recipe_ranks:count", {"recipe": recipe})
        return [tuple(stage) for stage in answer]

    return count


@pytest.mark.parametrize("recipe", available())
def test_every_name_in_a_recipe_exists(nemo_zygote: Zygote, recipe: str) -> None:
    assert nemo_zygote.run(1, "tests.ranks.recipe_ranks:unknown_names", {"recipe": recipe}) == [[]]


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_the_model_built_at_the_real_world_size_has_the_published_parameters(stages: Stages, recipe: str) -> None:
    counted = stages(recipe)
    assert len(counted) == layout_of(load(recipe)).pipeline
    assert sum(whole for whole, _, _ in counted) == PUBLISHED[recipe]
    assert all(trained == held for _, held, trained in counted)


@pytest.mark.parametrize(
    ("recipe", "base"), [("llama3_70b_lora", "llama3_70b_pretrain"), ("gpt_oss_120b_lora", "gpt_oss_120b_full")]
)
def test_lora_trains_adapters_only(stages: Stages, recipe: str, base: str) -> None:
    ((whole, held, trained),) = stages(recipe)
    assert 0 < trained < held / 100
    assert 0 < whole - PUBLISHED[base] < PUBLISHED[base] / 100


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=pytest.mark.long if name == "tiny_moe_cpu" else ()) for name in TINY]
)
def test_without_its_block_a_recipe_is_plain_nemo(nemo_zygote: Zygote, recipe: str) -> None:
    for rank in nemo_zygote.run(4, "tests.ranks.recipe_ranks:plain", {"recipe": recipe}):
        assert rank["strategy"] == "nemo.lightning.pytorch.strategies.megatron_strategy.MegatronStrategy"
        assert "checkpointless" not in rank["callbacks"]


def test_experts_train_through_a_kill(trainings_of: TrainingsOf) -> None:
    trainings, args = trainings_of(RUNNER, recipe="tiny_moe_cpu"), ("trainer.max_steps=4",)
    disturbed = trainings.rough(4, args, "sigkill@optimizer:rank=1,step=3")
    assert [incident.outcome for incident in disturbed.incidents] == [Outcome.RESUMED]
    undisturbed = trainings.calm(4, *args)
    losses = [float.fromhex(record.loss) for record in undisturbed.steps[0]]
    assert losses[-1] < losses[0]
