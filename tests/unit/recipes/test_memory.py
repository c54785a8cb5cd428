"""Test the calculated memory of a job's state: bytes per parameter are those that Megatron documents."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("hydra", reason="recipes need hydra-core")

from checkpointless.recipes.layout import layout_of
from checkpointless.recipes.memory import Count, Precision, Stage, fullest, memory, precision_of
from checkpointless.recipes.settings import load
from checkpointless.system.layout import Layout

MILLION = 1_000_000
DENSE = Stage(dense=Count(MILLION, MILLION), expert=Count(0, 0), whole=MILLION)
EIGHT = Layout(8, 8)


@pytest.mark.parametrize(
    ("precision", "fixed", "shared"),
    [(Precision(2, 2), 4, 16), (Precision(2, 4), 6, 12), (Precision(4, 4), 8, 8)],
    ids=["16-bit", "bf16-fp32-gradients", "fp32"],
)
@pytest.mark.parametrize("instances", [1, 2, 4])
def test_bytes_per_parameter_are_those_megatron_documents(
    precision: Precision, fixed: int, shared: int, instances: int
) -> None:
    size = memory(DENSE, replace(EIGHT, instances=instances), precision)
    assert size.total == MILLION * (fixed + shared * instances / 8)
    assert size.replica == MILLION * shared * (instances - 1) / 8
    whole = memory(DENSE, replace(EIGHT, sharded=False), precision)
    assert whole.total == MILLION * (fixed + shared)
    assert whole.replica == 0


def test_frozen_parameters_have_no_gradients_and_no_optimizer() -> None:
    lora = Stage(dense=Count(MILLION, 1000), expert=Count(MILLION, 0), whole=2 * MILLION)
    size = memory(lora, EIGHT, Precision(2, 4))
    assert (size.parameters, size.gradients, size.optimizer) == (4 * MILLION, 4000, 1500)


def test_experts_are_shared_by_those_that_hold_the_same_ones() -> None:
    experts = Stage(dense=Count(0, 0), expert=Count(MILLION, MILLION), whole=4 * MILLION)
    layout = replace(EIGHT, expert=4)
    assert memory(experts, layout, Precision(2, 4)).optimizer == 6 * MILLION
    two = memory(experts, replace(layout, instances=2), Precision(2, 4))
    assert two.optimizer == 12 * MILLION
    assert two.replica == 6 * MILLION


def test_the_fullest_stage_counts() -> None:
    small = Stage(dense=Count(1, 1), expert=Count(0, 0), whole=1)
    number, size = fullest([small, DENSE, small], EIGHT, Precision(4, 4))
    assert number == 1
    assert size == memory(DENSE, EIGHT, Precision(4, 4))


def test_precision_is_that_of_the_plugin() -> None:
    assert precision_of(load("tiny_gpt_cpu")) == Precision(4, 4)
    assert precision_of(load("llama3_8b_pretrain")) == Precision(2, 4)
    assert precision_of(load("llama3_8b_pretrain", ["trainer.plugins.grad_reduce_in_fp32=false"])) == Precision(
        2, 2
    )


@pytest.mark.parametrize("shards", [1, 2, 8, 64])
def test_the_peak_of_a_model_that_is_built_again(shards: int) -> None:
    """In bf16 with P parameters and d shards it is max(8P + 12P/d, 6P + 16P/d) bytes; in fp32 all is held, too."""
    layout = Layout(shards, shards)
    peak = max(8 * MILLION + 12 * MILLION / shards, 6 * MILLION + 16 * MILLION / shards)
    assert memory(DENSE, layout, Precision(2, 4)).peak == pytest.approx(peak, abs=4)
    assert memory(DENSE, layout, Precision(4, 4)).peak == (4 + 4 + 4 + 4 + 8 / shards) * MILLION


def test_the_eight_billion_model_on_two_nodes_takes_what_it_does_on_one_without_replicas() -> None:
    config = load("llama3_8b_pretrain")
    two, precision = layout_of(config), precision_of(config)
    one = replace(two, world_size=two.ranks_per_node, instances=1)
    assert memory(DENSE, two, precision).total == memory(DENSE, one, precision).total
    assert memory(DENSE, two, precision).replica == MILLION * 12 // 16
