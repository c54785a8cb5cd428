"""Test layouts that cannot hold the replicas of a recipe: one line says how many nodes it takes."""

from dataclasses import replace

import pytest

pytest.importorskip("nemo.collections.llm", reason="needs NeMo")

from checkpointless.strategies.nemo_run import _require
from checkpointless.system.layout import Layout

pytestmark = pytest.mark.nemo


@pytest.mark.parametrize(
    ("layout", "replicas", "nodes"),
    [
        (Layout(8, 8, tensor=4, pipeline=2), 2, 2),
        (Layout(8, 8, tensor=8), 2, 2),
        (Layout(24, 8, tensor=8), 2, 4),
        (Layout(64, 8, tensor=8, pipeline=4), 3, 12),
        (Layout(16, 8, expert=16, tensor=2, expert_tensor=1), 2, 4),
        (Layout(3, 1), 2, 4),
        (Layout(8, 8, tensor=3), 2, 3),
    ],
)
def test_a_layout_that_is_too_small_says_how_many_nodes_it_takes(layout: Layout, replicas: int, nodes: int) -> None:
    with pytest.raises(ValueError, match=rf"set num_nodes={nodes} with {layout.ranks_per_node} devices"):
        _require(layout, replicas)
    _require(replace(layout, world_size=nodes * layout.ranks_per_node), replicas)
