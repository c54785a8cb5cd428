"""Test how the command ``rehearse`` reads its words: scripts, modules and recipes, and what is wrong with them."""

import argparse
from pathlib import Path

import pytest

from checkpointless.cli import command_line
from checkpointless.cli.commands import rehearse
from checkpointless.cli.job import Program


def parsed(*words: str) -> argparse.Namespace:
    return command_line._parser().parse_args(["rehearse", *words])


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[argparse.Namespace]:
    """Return the options with which recipes were checked."""
    seen: list[argparse.Namespace] = []

    def recipe_program(options: argparse.Namespace) -> Program:
        seen.append(options)
        return Program("recipe", "runner", tuple(options.overrides), module=True, preload=())

    monkeypatch.setattr(rehearse, "recipe_program", recipe_program)
    return seen


def test_what_follows_a_script_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = parsed("--steps", "8", "train.py", "--steps", "100", "lr=1")
    program = rehearse._program(options)
    assert (program.script, program.script_args) == ("train.py", ("--steps", "100", "lr=1"))
    assert (options.steps, options.nproc_per_node) == (8, 2)
    program = rehearse._program(parsed("--nproc-per-node", "4", "-m", "package.train", "--cpu"))
    assert (program.job, program.module, program.script_args) == ("train", True, ("--cpu",))


def test_options_may_follow_a_recipe(trained: list[argparse.Namespace]) -> None:
    words = ("--seed", "3", "tiny_gpt_cpu", "--cpu", "--nproc-per-node", "4", "trainer.max_steps=12", "--steps=8")
    options = parsed(*words)
    assert rehearse._program(options).script_args == ("trainer.max_steps=12",)
    (seen,) = trained
    assert (seen.recipe, seen.cpu, seen.nproc_per_node, seen.steps, seen.seed) == ("tiny_gpt_cpu", True, 4, 8, 3)
    rehearse._program(parsed("my/own.yaml", "optim.lr=1"))
    assert trained[-1].recipe == "my/own.yaml"
    assert trained[-1].nproc_per_node is None, "the recipe says it"
