"""Layouts by arithmetic: the same groups as Megatron's own, and one line for what cannot work."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("hydra", reason="recipes need hydra-core")

from checkpointless.recipes.layout import Layout, check_layout, check_replicas, layout_of
from checkpointless.recipes.settings import RecipeError, available, load

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


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Layouts that can work."""
    size = st.sampled_from([1, 2, 3, 4])
    tensor, pipeline, context, expert, expert_tensor, times = (draw(size) for _ in range(6))
    instances = draw(st.sampled_from([1, 2, 2, 3]))
    model = math.lcm(tensor * context * instances, expert * expert_tensor * instances) * pipeline
    assume(model <= 192)
    world = model * times
    ranks_per_node = draw(st.sampled_from([size for size in range(1, 17) if world % size == 0]))
    return Layout(
        nodes=world // ranks_per_node,
        ranks_per_node=ranks_per_node,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=expert,
        expert_tensor=expert_tensor,
        instances=instances,
        global_batch=world,
        pipeline_before_data=draw(st.booleans())
        and tensor * context == expert * expert_tensor,  # Megatron's condition
    )


@contextmanager
def megatron(layout: Layout, monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> Iterator[dict[str, list[Any]]]:
    """Megatron's process groups at the real world size; gives the ranks of all, other ranks' too, by name."""
    pytest.importorskip("megatron.core")
    from megatron.core import parallel_state

    from checkpointless.recipes.shapes import as_rank

    made: dict[str, list[Any]] = {}
    create = parallel_state.create_group

    def note(ranks: Any = None, *args: Any, group_desc: str = "", **kwargs: Any) -> Any:
        made.setdefault(group_desc, []).append(tuple(ranks))
        return create(ranks, *args, group_desc=group_desc, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(parallel_state, "create_group", note)
        with as_rank(layout, rank):
            yield made


def test_there_is_a_published_layout_of_every_recipe() -> None:
    assert set(available()) == PUBLISHED.keys()


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_published_layouts_work_and_survive_the_loss_of_a_node(recipe: str) -> None:
    config = load(recipe)
    layout = layout_of(config)
    check_layout(config, layout)
    check_replicas(layout)
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


@pytest.mark.nemo
@pytest.mark.parametrize("sharded", [True, False])
def test_a_rank_finds_its_replicas_where_the_layout_says(sharded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron.core")
    from checkpointless.megatron.replicas import replicas

    moe = Layout(nodes=4, ranks_per_node=8, tensor=2, pipeline=2, expert=2, expert_tensor=2, instances=2)
    layout = replace(moe, sharded=sharded)
    groups = {rank: group for group in layout.replica_groups() for rank in group}
    for rank in (0, 5, 17, 31):
        with megatron(layout, monkeypatch, rank):
            assert replicas(sharded) == groups[rank]


@pytest.mark.nemo
@settings(max_examples=60)
@given(layout=layouts())
def test_any_layout_is_laid_out_as_megatron_does(layout: Layout) -> None:
    with pytest.MonkeyPatch.context() as patch, megatron(layout, patch) as groups:
        if layout.instances > 1:
            assert sorted(groups["HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L1"]) == layout.replica_groups()
        dense = sorted(groups["DATA_PARALLEL_GROUP_WITH_CP"])
    assert dense == sorted(layout.groups(layout._sizes(), ("cp", "dp")))


@settings(max_examples=50)
@given(layout=layouts())
def test_every_rank_is_in_one_replica_group(layout: Layout) -> None:
    try:
        layout.check()
        refused = ""
    except RecipeError as error:
        refused = str(error)
    assert not refused or (layout.pipeline_before_data and "different replicas" in refused)
    for sharded in (True, False):
        groups = replace(layout, sharded=sharded).replica_groups()
        assert sorted(itertools.chain(*groups)) == list(range(layout.world_size))


@settings(max_examples=50)
@given(layout=layouts())
def test_lost_with_a_node_means_what_it_says(layout: Layout) -> None:
    lost, groups = set(layout.lost_with_a_node()), layout.replica_groups()
    for node in range(layout.nodes):
        left = {rank for rank in range(layout.world_size) if rank // layout.ranks_per_node != node}
        gone = {group for group in groups if not left & set(group)}
        assert gone <= lost
        lost -= gone
    assert not lost


def test_replicas_on_one_node_are_found() -> None:
    layout = Layout(nodes=2, ranks_per_node=8, tensor=1, pipeline=2, instances=2)
    assert layout.lost_with_a_node() == layout.replica_groups()
    assert not replace(layout, pipeline=1).lost_with_a_node()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensor": 3}, "16 ranks cannot be cut into models of 3 ranks"),
        ({"expert": 3}, "16 ranks cannot be cut into sets of experts of 3 ranks"),
        ({"instances": 3}, "16 data-parallel ranks cannot hold 3 optimizer instances"),
        ({"expert": 16, "instances": 2}, "1 holders of an expert cannot hold 2 optimizer instances"),
        ({"global_batch": 40}, "a global batch of 40 is not a multiple of 1 x 16 ranks"),
        ({"virtual_pipeline": 2}, "needs pipeline_model_parallel_size above 1"),
        ({"tensor": 8, "expert_tensor": 8, "global_batch": 2}, "12 attention heads cannot be shared by 8 ranks"),
        ({"pipeline": 4, "global_batch": 4}, "6 layers cannot be shared by 4 pipeline stages"),
        (
            {"context": 2, "tensor": 4, "pipeline": 2, "instances": 2, "pipeline_before_data": True},
            "experts and other weights would have different replicas",
        ),
    ],
)
def test_what_cannot_work_is_one_line(change: dict[str, Any], message: str) -> None:
    layout = Layout(nodes=2, ranks_per_node=8, global_batch=16)
    with pytest.raises(RecipeError, match=message):
        replace(layout, **change).check(layers=6, heads=12)


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
    with pytest.raises(RecipeError, match=message):
        check_replicas(layout_of(load("tiny_gpt_cpu", overrides)))


def test_a_recipe_of_ones_own_may_leave_things_out(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("trainer: {devices: 2}\nmodel: {}\ndata: {}\n")
    config = load(own)
    layout = layout_of(config)
    check_layout(config, layout)
    assert (layout.world_size, layout.instances, layout.sharded) == (2, 1, False)
    check_replicas(layout)
    own.write_text("trainer: {devices: auto}\n")
    with pytest.raises(RecipeError, match=r"trainer\.devices must be a whole number of at least 1, not 'auto'"):
        layout_of(load(own))


def test_sizes_are_of_the_launcher_where_it_has_started_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert layout_of(load("llama3_8b_pretrain")).world_size == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")
    assert layout_of(load("llama3_8b_pretrain")).world_size == 12
    assert layout_of(load("llama3_8b_pretrain"), 5, 6).world_size == 30
