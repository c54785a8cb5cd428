"""The command ``run``: its options and its launch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from checkpointless.cli.command import Command
from checkpointless.cli.job import Program, add_job_options, launch_job
from checkpointless.cli.output import out
from checkpointless.cli.torchrun import add_torchrun_options, settle_torchrun_options
from checkpointless.cli.values import UsageError, modules

_EPILOG = """\
examples:
  checkpointless run --nproc-per-node 8 train.py --lr 1e-3
  checkpointless run --nproc-per-node 8 --preload nemo.collections.llm train.py
  checkpointless run --nproc-per-node 4 --cpu -m my_package.train --steps 20
  checkpointless run --nproc-per-node 4 --record-steps --fault sigkill@backward:rank=1,step=5 train.py
  checkpointless run --nproc-per-node 8 --nnodes 4 --node-rank 2 --rdzv-endpoint node0:29400 train.py
  checkpointless run --nproc-per-node 8 --dry-run train.py     starts nothing

Arguments after SCRIPT are the script's own. With `@HPWrapper()` on the script's main function, a rank that fails is
recovered in place or replaced, while the others keep their state.
"""


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``run``."""
    parser.usage = "%(prog)s [OPTIONS] SCRIPT [ITS ARGUMENTS]"
    add = parser.add_argument
    add("-m", "--module", action="store_true", help="SCRIPT is a module, as with `python -m`")
    add(
        "--preload",
        type=modules,
        metavar="MODULE,...",
        help="import these once, before ranks are forked (default: the script's imports from installed packages)",
    )
    add(
        "--dry-run",
        action="store_true",
        help="show what would be started; start nothing",
    )
    add_job_options(parser)
    add_torchrun_options(parser)
    add("script", metavar="SCRIPT", help="the training script")
    add("script_args", metavar="...", nargs=argparse.REMAINDER, help="its own arguments")


def run(options: argparse.Namespace) -> int:
    """Run a script on every rank of this node.

    Raises:
        UsageError: an option is wrong.
    """
    settings = settle_torchrun_options(options)
    if options.dry_run:
        return dry_run(options)
    return launch_job(options, program_of(options), None, settings)


def program_of(options: argparse.Namespace) -> Program:
    """Return what every rank runs.

    Raises:
        UsageError: a module of ``--preload`` does not exist.
    """
    script_dir = Path.cwd() if options.module else Path(options.script).resolve().parent
    _check_importable(options.preload or (), script_dir)
    return Program(
        name=options.script.rpartition(".")[2] if options.module else Path(options.script).stem,
        script=options.script,
        script_args=tuple(options.script_args),
        module=options.module,
        preload=options.preload,
    )


def dry_run(options: argparse.Namespace) -> int:
    """Show what `run` would start.

    Args:
        options: options of ``run``.

    Raises:
        UsageError: there is no such script.
    """
    nodes = "this node" if options.nnodes == 1 else f"each of {options.nnodes} nodes"
    ranks = f"{options.nproc_per_node} rank{'' if options.nproc_per_node == 1 else 's'}"
    name = f"the module {options.script}" if options.module else options.script
    if not options.module and not Path(options.script).is_file():
        raise UsageError(f"there is no script {options.script}")
    out(f"would start {ranks} of {name} on {nodes}")
    return 0


def _check_importable(modules: Sequence[str], script_dir: Path) -> None:
    """Raise unless the packages of ``modules`` can be found, without importing any.

    Args:
        modules: dotted names of the modules.
        script_dir: folder of the script, from which the script can import too.
    """
    import importlib
    import importlib.util
    from importlib.machinery import PathFinder

    importlib.invalidate_caches()
    for module in modules:
        root = module.partition(".")[0]
        if PathFinder.find_spec(root, [str(Path.cwd()), str(script_dir), *sys.path]) is not None:
            continue
        try:
            found = importlib.util.find_spec(root)  # by all finders: an editable install has a separate one
        except ValueError:  # it is imported already, from an unknown place
            found = None
        if found is None and root not in sys.modules:
            raise UsageError(f"there is no module {module}")


COMMAND = Command("run", "run a script on every rank of this node, through faults", add_run_options, run, _EPILOG)
