"""The options ``--fault`` and ``--chaos``, and their faults."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from checkpointless.cli.values import UsageError, count, has_cuda, positive

if TYPE_CHECKING:
    from checkpointless.faults.chaos import Outcome
    from checkpointless.faults.spec import FaultSpec

SEED_HELP = "seed of the draws (default: 0)"
_NEEDS_CHAOS = {"seed": None, "overlap": False, "chaos_case": None, "chaos_steps": None}

_FAULT_HELP = "inject a fault, e.g. sigkill@backward:rank=1,step=5; repeatable (list: `checkpointless faults`)"


def add_fault_option(parser: argparse._ActionsContainer) -> None:
    """Add ``--fault``, which may be given more than once."""
    parser.add_argument("--fault", dest="faults", action="append", default=[], metavar="SPEC", help=_FAULT_HELP)


def fault_specs(
    texts: Sequence[str], world_size: int, max_steps: int | None, nnodes: int = 1, cpu: bool = False
) -> tuple[FaultSpec, ...]:
    """Return the faults that were asked for.

    Args:
        texts: values of ``--fault``.
        max_steps: number of optimizer steps of the job; None if not known.

    Raises:
        UsageError: one of them cannot happen in this job.
    """
    from checkpointless.faults.spec import FaultKind, FaultSpecError, parse_all, validate

    try:
        specs = parse_all(texts, world_size, max_steps)
        if any(spec.kind is FaultKind.CUDA for spec in specs):
            validate(specs, world_size, max_steps, cuda=not cpu and has_cuda())
    except FaultSpecError as error:
        raise UsageError(str(error)) from error
    for spec in specs:
        if spec.kind.is_of_node and nnodes == 1:
            raise UsageError(f"fault {spec.text!r}: a node can only be lost in a job of several (--nnodes)")
    return specs


def add_job_chaos_options(parser: argparse._ActionsContainer) -> None:
    """Add the chaos options of ``run`` and ``train``."""
    add = parser.add_argument
    add("--chaos", type=positive, metavar="N", help="inject N drawn faults, one after the other")
    add("--seed", type=count, metavar="K", help=SEED_HELP)
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
    from checkpointless.faults.chaos import draw_faults

    try:
        texts, expected = draw_faults(
            options.seed or 0, options.chaos, nproc=world_size, steps=steps, overlap=options.overlap
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    options.faults += texts
    return expected


def judge_chaos(run_dir: Path, code: int, expected: Outcome) -> str:
    """Return what is wrong with the outcome of a job with drawn faults ("" if nothing is)."""
    from checkpointless.faults.chaos import outcome_of
    from checkpointless.observability.report.incidents import summarize
    from checkpointless.observability.telemetry.events import read_events

    outcome = outcome_of(code, summarize(read_events(run_dir)))
    if outcome is expected:
        return ""
    return f"expected: {expected.value}; found: " + (outcome.value if outcome else f"it ended with code {code}")
