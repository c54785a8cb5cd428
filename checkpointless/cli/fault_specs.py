"""The option ``--fault``, and its faults."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from checkpointless.cli.cuda import has_cuda
from checkpointless.cli.values import UsageError

if TYPE_CHECKING:
    from checkpointless.faults.spec import FaultSpec

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
        world_size: number of ranks.
        max_steps: number of optimizer steps of the job; None if not known.
        nnodes: number of nodes.
        cpu: whether the ranks use no GPU, even where there is one.

    Raises:
        UsageError: one of them cannot happen in this job.
    """
    from checkpointless.faults.spec import NODE_KINDS, FaultKind, FaultSpecError, parse_all, validate

    try:
        specs = parse_all(texts, world_size, max_steps)
        if any(spec.kind is FaultKind.CUDA for spec in specs):
            validate(specs, world_size, max_steps, cuda=not cpu and has_cuda())
    except FaultSpecError as error:
        raise UsageError(str(error)) from error
    for spec in specs:
        if spec.kind in NODE_KINDS and nnodes == 1:
            raise UsageError(f"fault {spec.text!r}: a node can only be lost in a job of several (--nnodes)")
    return specs
