"""The command ``demo``: its options and its default faults."""

from __future__ import annotations

import argparse
from pathlib import Path

from checkpointless.cli.chaos import (
    TRAINER_NAMES,
    add_demo_chaos_options,
    check_goes_with_chaos,
    demo_chaos,
    demo_trainer,
)
from checkpointless.cli.command import Command
from checkpointless.cli.fault_specs import add_fault_option, fault_specs
from checkpointless.cli.run_directory import check_can_be_made
from checkpointless.cli.values import UsageError, positive

_EPILOG = """\
examples:
  checkpointless demo
  checkpointless demo --nproc 4 --layout tp=2 --dropout 0.1 --fault sigkill@optimizer:rank=1,step=5
  checkpointless demo --trainer hsdp --nproc 8 --layout tp=2
  checkpointless demo --nproc 8 --layout tp=2,pp=2 --steps 6 --fault hang@backward:rank=3,step=4

Without --fault there are two: an exception in a backward pass and a SIGKILL inside an optimizer step.
Exit status: 0 if every fault happened and both runs are equal to the bit, 1 if not.
"""


def add_demo_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``demo``."""
    add = parser.add_argument
    add(
        "--trainer",
        choices=TRAINER_NAMES,
        metavar="NAME",
        help=f"trainer: {', '.join(TRAINER_NAMES)} (default: nemo; ddp where NeMo is not installed)",
    )
    add(
        "--nproc",
        "--nproc-per-node",
        type=positive,
        metavar="N",
        help="CPU ranks, up to 32 (default: 4; with --chaos: up to 8)",
    )
    add("--steps", type=positive, metavar="N", help="steps of each run (default: 10; with --chaos: 6)")
    add(
        "--layout",
        default="",
        metavar="tp=N,...",
        help="sizes of tp, pp, ep and cp, as the trainer has them (default: 1)",
    )
    add("--dropout", type=float, default=0.0, metavar="P", help="dropout, in [0, 1) (default: 0)")
    add_fault_option(parser)
    add("--run-dir", type=Path, metavar="D", help="directory of both runs (default: under runs/)")
    add_demo_chaos_options(parser)


def demo(options: argparse.Namespace) -> int:
    """Run the demo, or its jobs with drawn faults.

    Raises:
        UsageError: an option is wrong, or the trainer is not installed.
    """
    check_goes_with_chaos(options)
    if options.chaos is not None:
        return demo_chaos(options)
    options.nproc, options.steps = options.nproc or 4, options.steps or 10
    from checkpointless.testing.demo import DemoConfig, DemoError, parse_layout

    middle, late = max(1, options.steps * 4 // 10), max(1, options.steps * 7 // 10)
    faults = options.faults or [
        f"exception@backward:rank={options.nproc // 2},step={middle}",
        f"sigkill@optimizer:rank={min(1, options.nproc - 1)},step={late}",
    ]
    trainer = demo_trainer(options)
    try:
        config = DemoConfig(
            nproc=options.nproc,
            steps=options.steps,
            layout=parse_layout(options.layout, trainer.keys),
            dropout=options.dropout,
            faults=tuple(faults),
            run_dir=options.run_dir,
            trainer=trainer,
        )
    except DemoError as error:
        raise UsageError(str(error)) from error
    fault_specs(faults, options.nproc, options.steps, cpu=True)
    check_can_be_made(options.run_dir)
    from checkpointless.testing.demo.run import run_demo

    return run_demo(config)


COMMAND = Command(
    "demo", "train a small GPT with and without faults and compare the two", add_demo_options, demo, _EPILOG
)
