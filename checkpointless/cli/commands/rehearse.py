"""The command ``rehearse``: its options and its jobs."""

from __future__ import annotations

import argparse
import importlib.resources
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from checkpointless.cli.command import (
    Command,
    both,
    count,
    has_cuda,
    new_run_dir,
    out,
    positive,
    ranks,
    say,
    seconds,
)
from checkpointless.cli.commands.run import program_of
from checkpointless.cli.commands.train import recipe_program
from checkpointless.cli.job import Program, config_of
from checkpointless.system.environment import LOG_LEVEL_ENV, REHEARSAL_ENV, YES

if TYPE_CHECKING:
    from checkpointless.testing.rehearsal import Rehearsal

_TERM_GRACE_S = 5.0
_YAML = (".yaml", ".yml")
_RANKS = 2  # so that each part of the state has a second holder where the training is data parallel
_EPILOG = f"""\
examples:
  checkpointless rehearse --nproc-per-node 2 train.py --lr 1e-3
  checkpointless rehearse --cpu --steps 30 --faults 8 --seed 1 -m my_package.train
  checkpointless rehearse tiny_gpt_cpu --cpu --nproc-per-node 4 trainer.max_steps=12
  checkpointless rehearse --json train.py | jq .verdict

The job runs twice without faults, and then once per fault: an exception, a SIGKILL, one right after an epoch's end
and one right after a validation (if the first --steps steps reach them), and more with --faults. Phases, ranks and
steps are drawn from --seed. Two jobs run at a time; on GPUs, one. Everything recorded must be the same, bit by
bit: loss, parameters, buffers, optimizer, rank-local state, batches, validations and checkpoints. Otherwise the
last lines name what differs first and the point of the contract (docs/contract.md) that it points to.

Each job has a working directory of its own with links to everything in this one. New files stay there; existing
files and absolute paths are written where they are. {REHEARSAL_ENV} is 1 in these jobs.

Exit status: 0 exact; 1 inexact, or a fault was not recovered from; 2 wrong usage; 3 not rehearsed: the job fails
without faults, or two runs without faults differ.
"""


def _add_rehearse_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [OPTIONS] SCRIPT [ITS ARGUMENTS] | RECIPE [KEY=VALUE ...]"
    add = parser.add_argument
    add("-m", "--module", action="store_true", help="SCRIPT is a module, as with `python -m`")
    add(
        *both("--nproc-per-node"),
        type=ranks,
        metavar="N",
        help=f"ranks, as for `run` (default: {_RANKS}; a recipe's: its own)",
    )
    add("--cpu", action="store_true", help="let Megatron-core and NeMo train on CPUs")
    add(
        "--steps",
        type=positive,
        default=20,
        metavar="N",
        help="optimizer steps to compare (default: 20); a longer job is stopped after them",
    )
    add("--faults", dest="trials", type=positive, default=4, metavar="K", help="runs with a fault (default: 4)")
    add("--seed", type=count, default=0, metavar="S", help="seed of the draws (default: 0)")
    add("--timeout", type=seconds, default=900.0, metavar="S", help="limit of each job, in seconds (default: 900)")
    add("--json", action="store_true", help="print the result as JSON, and nothing else to standard output")
    add("--run-dir", type=Path, metavar="D", help="directory of all runs, which are kept (default: temporary)")
    add("--in-place", action="store_true", help="run the jobs in this working directory, one at a time")
    add("script", metavar="SCRIPT", help="the training script, or a recipe as for `train`")
    add("script_args", metavar="...", nargs=argparse.REMAINDER, help="its own arguments")
    parser.set_defaults(preload=None)


def _rehearse(options: argparse.Namespace) -> int:
    program = _program(options)
    from checkpointless.cli.tables import console
    from checkpointless.testing.rehearsal import EXACT

    rehearsal = _configured(options, program)
    folder = rehearsal.folder
    is_kept = options.run_dir is not None
    try:
        found = rehearsal.run(say)
        is_kept = is_kept or found.status != EXACT
        found = found if is_kept else replace(found, folder=None)
        if options.json:
            out(found.as_json())
        else:
            found.show(console())
        return found.status
    finally:
        shutil.rmtree(folder if not is_kept else folder / "folders", ignore_errors=True)


def _configured(options: argparse.Namespace, program: Program) -> Rehearsal:
    from checkpointless.launcher.agent.launch_config import LaunchConfig
    from checkpointless.testing.rehearsal import Rehearsal

    config = config_of(
        LaunchConfig,
        options,
        **vars(program) | {"run_dir": Path()},
        record_steps=True,
        stream_logs=False,
        term_grace_s=_TERM_GRACE_S,
        extra_env={LOG_LEVEL_ENV: os.environ.get(LOG_LEVEL_ENV, "warning"), REHEARSAL_ENV: YES},
    )
    uses_gpu = not options.cpu and has_cuda()
    if options.run_dir is not None:
        folder = new_run_dir(options.run_dir, program.job)
    else:
        folder = Path(tempfile.mkdtemp(prefix=f"checkpointless-rehearsal-{program.job}-"))
    return Rehearsal(
        program.job,
        config,
        options.steps,
        options.timeout,
        folder.resolve(),
        options.in_place,
        options.trials,
        options.seed,
        at_once=1 if uses_gpu or options.in_place else 2,
        imports=not uses_gpu,
    )


def _program(options: argparse.Namespace) -> Program:
    """Return what every rank runs; the number of ranks is filled in."""
    if options.module or not _is_recipe(options.script):
        options.nproc_per_node = options.nproc_per_node or _RANKS
        return program_of(options)
    _read_again(options)
    return recipe_program(options)


def _is_recipe(name: str) -> bool:
    """Return whether ``name`` is a recipe as for `train`: a YAML file, or the name of a bundled recipe."""
    if Path(name).suffix in _YAML:
        return True
    bundled = importlib.resources.files("checkpointless.recipes") / f"{name}.yaml"
    return not Path(name).exists() and name.isidentifier() and bundled.is_file()


def _read_again(options: argparse.Namespace) -> None:
    """Read options after the name of a recipe, which takes none itself; what is left are its overrides."""
    words = options.script_args
    overrides = [word for word in words if "=" in word and not word.startswith("-")]
    others = [word for word in words if word not in overrides]
    options.parser.parse_args([*others, options.script], namespace=options)
    options.recipe, options.overrides = options.script, overrides
    options.nnodes, options.dry_run = 1, False


COMMAND = Command(
    "rehearse", "prove on your own job that it is exact under faults", _add_rehearse_options, _rehearse, _EPILOG
)
