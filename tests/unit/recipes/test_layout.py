"""Test the layouts of published recipes: groups are Megatron's own, and a refusal is one line."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("hydra", reason="recipes need hydra-core")

from checkpointless.recipes.checks import check, layout_of
from checkpointless.recipes.settings import RecipeError, available, load
from tests.unit.megatron_groups import megatron

PUBLISHED = {
    # recipe: ranks, data-parallel ranks, distance of the holders of a shard
    "gpt_oss_120b_full": (128, 32, 16),
    "gpt_oss_120b_lora": (16, 16, 8),
    "llama3_70b_lora": (16, 2, 8),
    "llama3_70b_pretrain": (128, 4, 16),
    "llama3_8b_pretrain": (16, 8, 8),
    "tiny_gpt_cpu": (4, 4, 2),
    "tiny_lora_cpu": (4, 4, 2),
    "tiny_moe_cpu": (4, 4, 2),
}


def test_there_is_a_published_layout_of_every_recipe() -> None:
    assert set(available()) == PUBLISHED.keys()


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_published_layouts_work_and_survive_the_loss_of_a_node(recipe: str) -> None:
    config = load(recipe)
    layout = layout_of(config)
    check(config, layout, needs_replicas=True)
    groups = layout.replica_groups()
    assert (layout.world_size, layout.data, groups[0][1] - groups[0][0]) == PUBLISHED[recipe]
    assert {len(group) for group in groups} == {2}
    assert sorted(itertools.chain(*groups)) == list(range(layout.world_size))
    if layout.nodes > 1:
        assert not layout.lost_with_a_node()


@pytest.mark.nemo
@pytest.mark.parametrize("recipe", PUBLISHED)
def test_replica_groups_are_megatrons_at_the_real_world_size(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_of(load(recipe))
    with megatron(layout, monkeypatch) as groups:
        assert sorted(groups["HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L1"]) == layout.replica_groups()
        assert len(groups["DATA_PARALLEL_GROUP"][0]) == layout.data
        assert len(groups["EXPERT_DATA_PARALLEL_GROUP"][0]) == layout.expert_data
        shards = {len(ranks) for ranks in groups["INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP"]}
        assert shards == {layout.shards}
        shards = {len(ranks) for ranks in groups["HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L0"]}
        assert shards == {layout.expert_shards}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["strategy.num_distributed_optimizer_instances=1"], "set strategy.num_distributed_optimizer_instances=2"),
        (
            [
                "optim.config.use_distributed_optimizer=false",
                "strategy.num_distributed_optimizer_instances=1",
                "strategy.tensor_model_parallel_size=4",
            ],
            "use more, or smaller parallel sizes",
        ),
    ],
)
def test_no_replica_is_one_line_that_says_what_to_set(overrides: list[str], message: str) -> None:
    config = load("tiny_gpt_cpu", overrides)
    with pytest.raises(RecipeError, match=message):
        check(config, layout_of(config), needs_replicas=True)
