"""Test the layouts of published recipes: groups are Megatron's own, and what --dry-run says of them."""

from __future__ import annotations

import io
import itertools
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("hydra", reason="recipes need hydra-core")

from rich.console import Console

from checkpointless.cli import command_line
from checkpointless.recipes.checks import _replica_lines, check, layout_of, show
from checkpointless.recipes.settings import RecipeError, available, load
from checkpointless.system.layout import Layout
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
        assert set(map(len, groups["INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP"])) == {layout.shards}
        assert set(map(len, groups["HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L0"])) == {layout.expert_shards}


ALONE, PLAIN = "strategy.num_distributed_optimizer_instances=1", "optim.config.use_distributed_optimizer=false"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([ALONE], "set strategy.num_distributed_optimizer_instances=2"),
        ([ALONE, PLAIN, "strategy.tensor_model_parallel_size=4"], "use more, or smaller parallel sizes"),
    ],
)
def test_no_replica_is_one_line_that_says_what_to_set(overrides: list[str], message: str) -> None:
    config = load("tiny_gpt_cpu", overrides)
    with pytest.raises(RecipeError, match=message):
        check(config, layout_of(config), needs_replicas=True)


def shown(recipe: str, *overrides: str, layout: Layout | None = None) -> str:
    page, config = io.StringIO(), load(recipe, overrides)
    console = Console(file=page, markup=False, highlight=False, emoji=False, width=160)
    show(config, layout or layout_of(config), console)
    return page.getvalue()


def test_the_loss_of_a_node_is_said_plainly() -> None:
    apart = _replica_lines(Layout(16, 8, instances=2), enabled=True)
    assert "8 replica groups of 2 ranks, the first: ranks 0, 8 (8 ranks are a node)." in apart
    assert any(line.startswith("The loss of a whole node: survivable") for line in apart)
    together = _replica_lines(Layout(16, 8, pipeline=2, instances=2), enabled=True)
    assert any("NOT survivable. 8 of 8 groups" in line and "ranks 0, 4 for example" in line for line in together)
    alone = _replica_lines(Layout(8, 8, instances=2), enabled=True)
    assert alone[-1] == "The loss of the node: not survivable, there is no other."
    assert _replica_lines(Layout(8, 8), enabled=False) == [
        "checkpointless is off in this recipe: nothing is recovered from memory.",
        "No replicas: a shard has one holder, and is lost with its process.",
    ]
    assert _replica_lines(Layout(8, 8), enabled=True, has_copies=True) == [
        "No replicas: a shard has one holder, and comes from a copy in tiers."
    ]


def test_what_it_shows_is_the_recipe_as_it_would_be_trained() -> None:
    layout = replace(layout_of(load("llama3_8b_pretrain")), world_size=12, ranks_per_node=4)
    text = shown("llama3_8b_pretrain", "trainer.max_steps=77", layout=layout)
    for words in ("max_steps: 77", "num_nodes: 3", "devices: 4"):
        assert words in text
    assert "${" not in text
    assert text.endswith("yours to give\ndata.paths\ndata.tokenizer.pretrained_model_name\n")
    assert all(line == line.rstrip() for line in text.splitlines())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["llama3_70b_pretrain", "--dry-run", "--nnodes", "1"], "8 ranks cannot be cut into models of 32 ranks"),
        (["llama3_70b_pretrain", "--dry-run", "--nnodes", "4"], "cannot hold 2 optimizer instances"),
        (["llama3_8b_pretrain", "--dry-run", ALONE], "there is no replica"),
        (["llama3_8b_pretrain", "--dry-run", "--cpu"], "leave out --cpu"),
        (["llama3_8b_pretran", "--dry-run"], "did you mean llama3_8b_pretrain"),
        (["tiny_gpt_cpu", "--cpu", "--nproc-per-node", "3"], "cannot hold 2 optimizer instances"),
    ],
)
def test_what_cannot_work_ends_in_a_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["train", *argv]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert message in captured.err


def test_a_dry_run_piped_is_plain_text_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command_line.main(["train", "tiny_moe_cpu", "--dry-run", "trainer.max_steps=7"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "\x1b" not in said.out
    assert "max_steps: 7" in said.out
    assert "replica groups of 2 ranks" in said.out
    assert not list(tmp_path.iterdir())
