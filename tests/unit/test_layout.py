"""Test calculated layouts: groups are the same as Megatron's own, and what cannot work is said in one line."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from checkpointless.system.layout import Layout, LayoutError
from tests.drawn import examples
from tests.unit.megatron_groups import megatron


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    size = st.sampled_from([1, 2, 3, 4])
    sizes: dict[str, Any] = {
        name: draw(size) for name in ("tensor", "pipeline", "context", "expert", "expert_tensor")
    }
    instances = draw(st.sampled_from([1, 2, 2, 3]))
    dense, experts = sizes["tensor"] * sizes["context"], sizes["expert"] * sizes["expert_tensor"]
    model = math.lcm(dense * instances, experts * instances) * sizes["pipeline"]
    assume(model <= 192)
    world = model * draw(size)
    ranks_per_node = draw(st.sampled_from([size for size in range(1, 17) if world % size == 0]))
    before = draw(st.booleans()) and dense == experts  # Megatron's condition
    layout = Layout(world, ranks_per_node, **sizes, instances=instances, global_batch=world)
    return replace(layout, pipeline_before_data=before)


@pytest.mark.nemo
@pytest.mark.parametrize("sharded", [True, False])
def test_a_rank_finds_its_replicas_where_the_layout_says(sharded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron.core")
    from checkpointless.integrations.megatron.state import _dense_and_experts, replicas

    moe = Layout(32, 8, tensor=2, pipeline=2, expert=2, expert_tensor=2, instances=2)
    layout = replace(moe, sharded=sharded)
    for rank in (0, 5, 17, 31):
        with megatron(layout, monkeypatch, rank):
            assert {*replicas(sharded)} == layout.replicas(rank)
            both = _dense_and_experts()
            assert both is not None
            if not sharded:
                assert sorted(both) == [group for group in layout.replica_groups() if rank in group]
                assert [len(each) for each in both] == [8, 4]


@pytest.mark.nemo
@examples(60)
@given(layout=layouts())
def test_any_layout_is_laid_out_as_megatron_does(layout: Layout) -> None:
    with pytest.MonkeyPatch.context() as patch, megatron(layout, patch) as groups:
        if layout.instances > 1:
            assert sorted(groups["HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L1"]) == layout.replica_groups()
        dense = sorted(groups["DATA_PARALLEL_GROUP_WITH_CP"])
    assert dense == sorted(layout.groups(layout._dense_sizes(), ("cp", "dp")))


@examples(50)
@given(layout=layouts())
def test_every_rank_is_in_one_replica_group(layout: Layout) -> None:
    try:
        layout.check()
        refused = ""
    except LayoutError as error:
        refused = str(error)
    assert not refused or (layout.pipeline_before_data and "different replicas" in refused)
    for sharded in (True, False):
        each = replace(layout, sharded=sharded)
        groups = {each.replicas(rank) for rank in range(layout.world_size)}
        assert all(rank in each.replicas(rank) for rank in range(layout.world_size))
        assert sorted(itertools.chain(*groups)) == list(range(layout.world_size))
        if sharded:
            assert {frozenset(group) for group in each.replica_groups()} == groups


@examples(50)
@given(layout=layouts())
def test_lost_with_a_node_means_what_it_says(layout: Layout) -> None:
    lost, groups = set(layout.lost_with_a_node()), layout.replica_groups()
    for node in range(layout.nodes):
        left = {rank for rank in range(layout.world_size) if rank // layout.ranks_per_node != node}
        gone = {group for group in groups if not left & set(group)}
        assert gone <= lost
        lost -= gone
    assert not lost


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
    layout = Layout(16, 8, global_batch=16)
    with pytest.raises(LayoutError, match=message):
        replace(layout, **change).check(layers=6, heads=12)


@examples(50)
@given(layout=layouts(), replicas=st.integers(2, 4))
def test_the_nodes_for_replicas_are_the_fewest(layout: Layout, replicas: int) -> None:
    def can_hold(nodes: int) -> bool:
        dense, experts = replace(layout, world_size=nodes * layout.ranks_per_node).holders()
        return bool(dense) and dense % replicas == experts % replicas == 0

    nodes = layout.nodes_for(replicas)
    assert can_hold(nodes)
    assert not any(can_hold(fewer) for fewer in range(layout.nodes, nodes))
