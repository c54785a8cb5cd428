"""The command ``train``: its options, the checks before anything starts, the launch, and the dry run."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from checkpointless.cli.command import Command, UsageError, has_cuda
from checkpointless.cli.job import Program, add_job_options, launch_job
from checkpointless.system.environment import CPU_ENV

if TYPE_CHECKING:
    from omegaconf import DictConfig

_EPILOG = """\
examples:
  checkpointless train tiny_gpt_cpu --cpu --nproc-per-node 4
  checkpointless train my_recipe.yaml --nproc-per-node 8 trainer.max_steps=1000 optim.config.lr=3e-4
  checkpointless train tiny_gpt_cpu --cpu --nproc-per-node 4 --fault exception@forward:rank=2,step=7
  checkpointless train llama3_70b_pretrain --dry-run     layout and replicas; starts nothing
"""


def _add_train_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [OPTIONS] RECIPE [KEY=VALUE ...]"
    add_job_options(parser, default_ranks="the recipe's")
    parser.add_argument(
        "--dry-run", action="store_true", help="show the resolved recipe, layout and replicas; start nothing"
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file, or the name of a bundled recipe")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="value to set, by dotted key")
    parser.set_defaults(nproc_per_node=None, nnodes=None)  # None: as in the recipe


def _train(options: argparse.Namespace) -> int:
    config = _check_train(options, has_cuda)
    if options.dry_run:
        from checkpointless.cli.tables import console
        from checkpointless.recipes.checks import layout_of, show

        show(config, layout_of(config, options.nnodes, options.nproc_per_node), console())
        return 0
    max_steps = config.trainer.get("max_steps")
    last = max_steps if isinstance(max_steps, int) and max_steps > 0 else None  # -1: all steps of the epochs
    return launch_job(options, _program(options, config), last)


def recipe_program(options: argparse.Namespace) -> Program:
    """Check that a recipe can be trained as asked, fill in the number of ranks, and return what every rank runs."""
    return _program(options, _check_train(options, has_cuda))


def _program(options: argparse.Namespace, config: DictConfig) -> Program:
    from checkpointless.recipes.settings import RECIPE_RUNNER, preloads_of

    return Program(
        job=Path(options.recipe).stem,
        script=RECIPE_RUNNER,
        script_args=(options.recipe, *options.overrides),
        module=True,
        preload=preloads_of(config),
    )


def _check_train(options: argparse.Namespace, has_cuda: Callable[[], bool]) -> DictConfig:
    """Load the recipe, check that it can be trained as asked, and fill in the numbers of nodes and ranks."""
    try:
        from checkpointless.recipes.checks import check, layout_of
        from checkpointless.recipes.settings import RecipeError, load, needs_gpu, require_complete
    except ImportError as error:
        raise UsageError(f"`train` needs {error.name}: pip install -e '.[nemo]' in a clone") from error
    name = options.recipe
    options.cpu = options.cpu or os.environ.get(CPU_ENV) == "1"
    try:
        config = load(name, options.overrides)
        if config.trainer.get("accelerator") == "cpu":  # which asks for CPU ranks, as `--cpu` does
            options.cpu = True
        if needs_gpu(config) and options.cpu:
            raise UsageError(f"{name} trains on GPUs (trainer.accelerator=gpu): leave out --cpu")
        if needs_gpu(config) and not options.dry_run and not has_cuda():
            raise UsageError(
                f"{name} needs GPUs and this machine has none: see what it would do with --dry-run, "
                "or train tiny_gpt_cpu"
            )
        if not options.dry_run:
            require_complete(config, name)
        layout = layout_of(config, options.nnodes or (None if options.dry_run else 1), options.nproc_per_node)
        check(config, layout, needs_replicas=options.dry_run)
    except RecipeError as error:
        raise UsageError(str(error)) from error
    options.nnodes, options.nproc_per_node = layout.nodes, layout.ranks_per_node
    return config


COMMAND = Command("train", "train a NeMo recipe, through faults", _add_train_options, _train, _EPILOG)
