"""Test the recipes on real NeMo and Megatron: names, parameters at the real size, and that they train."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from checkpointless.faults.ledger import fired
from checkpointless.observability.report.incidents import Outcome
from checkpointless.observability.report.verify import compare
from checkpointless.recipes.dry_run import show
from checkpointless.recipes.layout import layout_of
from checkpointless.recipes.memory import GIB, Count, Stage, fullest, memory, precision_of
from checkpointless.recipes.settings import available, load
from tests.ranks.jobs import run_job
from tests.ranks.nemo_zygote import Zygote
from tests.ranks.test_state import BF16

pytestmark = [pytest.mark.ranks, pytest.mark.nemo]

# Hugging Face's model pages (8.03 B, 70.6 B) and OpenAI's model card of gpt-oss (116.83 B) publish these.
PUBLISHED = {
    "llama3_8b_pretrain": 8_030_261_248,
    "llama3_70b_pretrain": 70_553_706_496,
    "gpt_oss_120b_full": 116_829_156_672,
}
DOCUMENT = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
TINY = [recipe for recipe in available() if recipe.startswith("tiny_")]


@pytest.fixture(scope="module")
def stages(nemo_zygote: Zygote) -> Callable[[str], list[Stage]]:
    """Return a function that counts the parameters on each GPU of every stage of a recipe, each recipe once."""
    known: dict[str, list[Stage]] = {}

    def count(recipe: str) -> list[Stage]:
        if recipe not in known:
            (answer,) = nemo_zygote.run(1, "tests.ranks.recipe_ranks:count", {"recipe": recipe})
            known[recipe] = [
                Stage(dense=Count(**stage["dense"]), expert=Count(**stage["expert"]), whole=stage["whole"])
                for stage in answer
            ]
        return known[recipe]

    return count


@pytest.mark.parametrize("recipe", available())
def test_every_name_in_a_recipe_exists(nemo_zygote: Zygote, recipe: str) -> None:
    assert nemo_zygote.run(1, "tests.ranks.recipe_ranks:unknown_names", {"recipe": recipe}) == [[]]


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_the_model_built_at_the_real_world_size_has_the_published_parameters(
    stages: Callable[[str], list[Stage]], recipe: str
) -> None:
    counted = stages(recipe)
    assert len(counted) == layout_of(load(recipe)).pipeline
    assert sum(stage.whole for stage in counted) == PUBLISHED[recipe]
    assert all(count.trained == count.total for stage in counted for count in (stage.dense, stage.expert))


@pytest.mark.parametrize(
    ("recipe", "base"), [("llama3_70b_lora", "llama3_70b_pretrain"), ("gpt_oss_120b_lora", "gpt_oss_120b_full")]
)
def test_lora_trains_adapters_only(stages: Callable[[str], list[Stage]], recipe: str, base: str) -> None:
    (stage,) = stages(recipe)
    assert 0 < stage.dense.trained < stage.dense.total / 100
    assert stage.expert.trained == 0
    assert 0 < stage.whole - PUBLISHED[base] < PUBLISHED[base] / 100


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["strategy.tensor_model_parallel_size=3", "trainer.devices=6", "data.global_batch_size=8"],
            "RecipeError: 32 attention heads cannot be shared by 3 ranks",
        ),
        (["model.config.vocab_size=null"], "the size of the vocabulary is the tokenizer's"),
        (["model.config.recompute_granularity=nonsense"], ""),
    ],
)
def test_a_model_that_cannot_be_built_is_one_line(nemo_zygote: Zygote, overrides: list[str], message: str) -> None:
    arguments = {"recipe": "llama3_8b_pretrain", "overrides": overrides}
    (answer,) = nemo_zygote.run(1, "tests.ranks.recipe_ranks:count", arguments)
    assert answer.startswith(message)
    assert "\n" not in answer


@pytest.mark.parametrize("overrides", [(), BF16], ids=["fp32", "bf16"])
def test_the_memory_table_is_what_megatron_allocates(
    nemo_zygote: Zygote, stages: Callable[[str], list[Stage]], overrides: tuple[str, ...]
) -> None:
    """They differ by padding, which Megatron adds to each parameter and bucket, and which a small model feels."""
    config = load("tiny_gpt_cpu", overrides)
    expected = memory(stages("tiny_gpt_cpu")[0], layout_of(config), precision_of(config))
    for instances in (1, 2):
        args = [*overrides, f"strategy.num_distributed_optimizer_instances={instances}"]
        measured = nemo_zygote.run(4, "tests.ranks.recipe_ranks:measure", {"overrides": args})
        optimizer = expected.optimizer - (expected.replica if instances == 1 else 0)
        assert {rank["parameters"] for rank in measured} == {expected.parameters}
        for rank in measured:
            assert expected.gradients <= rank["gradients"] < expected.gradients * 1.02
        # Shards differ by what of their ends is padding; together they hold every parameter as often as it is held.
        assert sum(rank["optimizer"] for rank in measured) == pytest.approx(4 * optimizer, rel=0.001)
        assert max(rank["optimizer"] for rank in measured) < optimizer * 1.02


@pytest.mark.parametrize("recipe", [recipe for recipe in available() if recipe not in TINY])
def test_the_documents_show_what_the_dry_run_shows(stages: Callable[[str], list[Stage]], recipe: str) -> None:
    config = load(recipe)
    layout = layout_of(config)
    if recipe == "llama3_8b_pretrain":
        page = io.StringIO()
        show(config, layout, stages(recipe), Console(file=page, width=160))
        text = page.getvalue()
        assert f"`{recipe}`:\n\n```text\n{text[text.index('layout') :].rstrip()}\n```" in DOCUMENT
    sizes = f"TP {layout.tensor}, PP {layout.pipeline}, CP {layout.context}, EP {layout.expert}, DP {layout.data}"
    size = fullest(stages(recipe), layout, precision_of(config))[1]
    sums = [f"{each / GIB:.2f} GiB" for each in (size.total - size.replica, size.total, size.replica)]
    whole = sum(stage.whole for stage in stages(recipe))
    row = [f"`{recipe}`", f"{layout.nodes} x {layout.ranks_per_node}", sizes, f"{whole:,}", *sums]
    assert f"| {' | '.join(row)} |" in DOCUMENT


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=pytest.mark.long if name == "tiny_moe_cpu" else ()) for name in TINY]
)
def test_without_its_block_a_recipe_is_plain_nemo(nemo_zygote: Zygote, recipe: str) -> None:
    for rank in nemo_zygote.run(4, "tests.ranks.recipe_ranks:plain", {"recipe": recipe}):
        assert rank["strategy"] == "nemo.lightning.pytorch.strategies.megatron_strategy.MegatronStrategy"
        assert "checkpointless" not in rank["callbacks"]


@pytest.mark.long
def test_a_dry_run_is_plain_text_and_starts_nothing(nemo_zygote: Zygote, tmp_path: Path) -> None:
    argv = ["train", "tiny_moe_cpu", "--dry-run", "trainer.max_steps=7"]
    arguments = {"argv": argv, "folder": str(tmp_path)}
    here = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}  # not those of the one process that carries it out
    (answer,) = nemo_zygote.run(1, "tests.ranks.docs_commands:command_here", arguments, env=here, limit_s=240)
    assert answer["code"] == 0, answer["out"]
    assert "\x1b" not in answer["out"]
    assert "max_steps: 7" in answer["out"]
    assert "399,488 parameters in all" in answer["out"]
    assert not list(tmp_path.iterdir())


def test_experts_train_through_a_kill(nemo_zygote: Zygote, tmp_path: Any) -> None:
    args = ["tiny_moe_cpu", "trainer.max_steps=4"]
    fault = "sigkill@optimizer:rank=1,step=3"
    undisturbed = run_job(nemo_zygote, tmp_path / "undisturbed", 4, script_args=args)
    disturbed = run_job(nemo_zygote, tmp_path / "disturbed", 4, script_args=args, faults=(fault,))
    assert (undisturbed.code, disturbed.code) == (0, 0), disturbed.story()
    assert fired(disturbed.run_dir) == {fault: 1}
    assert [incident.outcome for incident in disturbed.incidents] == [Outcome.RESUMED]
    verdict = compare(undisturbed.steps, disturbed.steps)
    assert verdict.equal, verdict.sentence
    losses = [float.fromhex(record.loss) for record in undisturbed.steps[0]]
    assert losses[-1] < losses[0]
