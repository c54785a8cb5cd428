"""The options and commands of chaos: faults drawn from a seed, for jobs of the demo and for a user's jobs."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpointless.cli.output import say
from checkpointless.cli.run_directory import RUNS_DIR, new_run_dir
from checkpointless.cli.values import UsageError, count, positive
from checkpointless.faults.chaos import Outcome, draw_faults, outcome_of
from checkpointless.observability.report.incidents import summarize
from checkpointless.observability.telemetry.events import read_events

if TYPE_CHECKING:
    from checkpointless.testing.demo import Trainer

DEMO_STEPS, DEMO_RANKS = 6, 8
#: Names of the demo's trainers, which cost an import; a test compares the two.
TRAINER_NAMES = ("nemo", "ddp", "hsdp", "megatron", "bridge", "lightning-ddp", "lightning-hsdp")
_DEFAULT, _WITHOUT_NEMO = "nemo", "ddp"
_SEED_HELP = "seed of the draws (default: 0)"
_NEEDS_CHAOS = {"seed": None, "overlap": False, "chaos_case": None, "chaos_steps": None}


def add_demo_chaos_options(parser: argparse.ArgumentParser) -> None:
    """Add the chaos options of ``demo``."""
    add = parser.add_argument
    add("--chaos", type=positive, metavar="N", help="run N small jobs with drawn layouts and faults instead")
    add("--seed", type=count, metavar="K", help=_SEED_HELP)
    add("--overlap", action="store_true", help="give half of the jobs a second fault")
    add("--chaos-case", type=count, metavar="I", help="run only case I of the N")


def add_job_chaos_options(parser: argparse._ActionsContainer) -> None:
    """Add the chaos options of ``run`` and ``train``."""
    add = parser.add_argument
    add("--chaos", type=positive, metavar="N", help="inject N drawn faults, one after the other")
    add("--seed", type=count, metavar="K", help=_SEED_HELP)
    add("--overlap", action="store_true", help="inject a second fault during half of the recoveries")
    add("--chaos-steps", type=positive, metavar="S", help="optimizer steps of the job (known for `train`)")


def check_goes_with_chaos(options: argparse.Namespace) -> None:
    """Refuse options that mean nothing without ``--chaos``.

    Raises:
        UsageError: one of these options is given without ``--chaos``.
    """
    for name, default in _NEEDS_CHAOS.items():
        if options.chaos is None and getattr(options, name, default) != default:
            raise UsageError(f"--{name.replace('_', '-')} needs --chaos")


def draw_into(options: argparse.Namespace, world_size: int, steps: int | None) -> Outcome | None:
    """Add drawn faults to those that were asked for.

    Args:
        options: options of ``run`` or ``train``; the drawn faults are added to ``options.faults``.
        world_size: number of ranks.
        steps: number of optimizer steps of the job; None if not known.

    Returns:
        The expected outcome of the job; None if no drawn faults were asked for.

    Raises:
        UsageError: the faults cannot be drawn as asked.
    """
    check_goes_with_chaos(options)
    if options.chaos is None:
        return None
    steps = options.chaos_steps or steps
    if steps is None:
        raise UsageError("--chaos needs the number of optimizer steps: add --chaos-steps S")
    try:
        texts, expected = draw_faults(
            options.seed or 0, options.chaos, nproc=world_size, steps=steps, overlap=options.overlap
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    options.faults += texts
    return expected


def judge_chaos(run_dir: Path, code: int, expected: Outcome) -> str:
    """Return what is wrong with the outcome of a job with drawn faults ("" if nothing is).

    Args:
        run_dir: run directory of the job.
        code: exit code of the job.
        expected: outcome that :func:`draw_into` returned.
    """
    outcome = outcome_of(code, summarize(read_events(run_dir)))
    if outcome is expected:
        return ""
    return f"expected: {expected.value}; found: " + (outcome.value if outcome else f"it ended with code {code}")


def demo_trainer(options: argparse.Namespace) -> Trainer:
    """Return the trainer that ``options`` ask for; where they ask for none, NeMo's, or DDP's without NeMo.

    Raises:
        UsageError: it is not installed.
    """
    from checkpointless.testing.demo import TRAINERS, DemoError

    trainer = TRAINERS[options.trainer or _DEFAULT]
    try:
        trainer.require()
    except DemoError as error:
        if options.trainer is not None:
            raise UsageError(str(error)) from error
        say(f"{error}; what trains is --trainer {_WITHOUT_NEMO}")
        return TRAINERS[_WITHOUT_NEMO]
    return trainer


def demo_chaos(options: argparse.Namespace) -> int:
    """Run ``demo --chaos``.

    Raises:
        UsageError: the command cannot be done as asked.
    """
    asked: dict[str, Any] = {"--layout": options.layout, "--dropout": options.dropout, "--fault": options.faults}
    fixed = [name for name, value in asked.items() if value]
    if fixed:
        raise UsageError(f"--chaos draws layouts and faults itself: leave {', '.join(fixed)} out")
    if options.chaos_case is not None and options.chaos_case >= options.chaos:
        raise UsageError(f"--chaos-case must be below {options.chaos}, not {options.chaos_case}")
    trainer = demo_trainer(options)
    try:
        from checkpointless.cli.tables import console
        from checkpointless.testing.demo.chaos import ChaosConfig, run_chaos

        config = ChaosConfig(
            cases=options.chaos,
            seed=options.seed or 0,
            overlap=options.overlap,
            only=options.chaos_case,
            steps=options.steps or DEMO_STEPS,
            most_ranks=options.nproc or DEMO_RANKS,
            run_dir=options.run_dir or RUNS_DIR,
            trainer=trainer,
        )
        config.drawn()  # what cannot be drawn is refused before a directory is made
        return run_chaos(replace(config, run_dir=new_run_dir(options.run_dir, "chaos")), console())
    except ValueError as error:
        raise UsageError(str(error)) from error
