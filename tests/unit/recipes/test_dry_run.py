"""Test what `train --dry-run` says of a layout."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("hydra", reason="recipes need hydra-core")

from rich.console import Console

from checkpointless.cli import command_line
from checkpointless.recipes.checks import _replica_lines, layout_of, show
from checkpointless.recipes.settings import load
from checkpointless.system.layout import Layout


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
    assert "max_steps: 77" in text
    assert "num_nodes: 3" in text
    assert "devices: 4" in text
    assert "${" not in text
    assert text.endswith("yours to give\ndata.paths\ndata.tokenizer.pretrained_model_name\n")
    assert all(line == line.rstrip() for line in text.splitlines())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["llama3_70b_pretrain", "--dry-run", "--nnodes", "1"], "8 ranks cannot be cut into models of 32 ranks"),
        (["llama3_70b_pretrain", "--dry-run", "--nnodes", "4"], "cannot hold 2 optimizer instances"),
        (
            ["llama3_8b_pretrain", "--dry-run", "strategy.num_distributed_optimizer_instances=1"],
            "there is no replica",
        ),
        (["llama3_8b_pretrain", "--dry-run", "--cpu"], "leave out --cpu"),
        (["llama3_8b_pretran", "--dry-run"], "did you mean llama3_8b_pretrain"),
        (["tiny_gpt_cpu", "--cpu", "--nproc-per-node", "3"], "cannot hold 2 optimizer instances"),
    ],
)
def test_what_cannot_work_ends_in_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["train", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
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
