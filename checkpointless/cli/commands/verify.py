"""The command ``verify``: a comparison of two runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from checkpointless.cli.command import Command, out
from checkpointless.cli.run_directory import check_run_dir
from checkpointless.cli.values import UsageError


def _add_verify_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``verify``."""
    add = parser.add_argument
    add("run_a", type=Path, metavar="RUN_A", help="run directory of a run with --record-steps")
    add("run_b", type=Path, metavar="RUN_B", help="run directory of another one")


def verify(options: argparse.Namespace) -> int:
    """Compare two runs and show the first difference.

    Returns:
        0 if they are equal, 1 if not.

    Raises:
        UsageError: a run does not exist, or was not recorded.
    """
    from checkpointless.cli.tables import console, verdict_table
    from checkpointless.observability.report.incidents import gone_back
    from checkpointless.observability.report.verify import compare
    from checkpointless.observability.telemetry.events import read_events
    from checkpointless.observability.telemetry.steps import read_steps

    steps, again = [], []
    for run_dir in (options.run_a, options.run_b):
        check_run_dir(run_dir)
        try:
            steps.append(read_steps(run_dir))
            again.append(gone_back(read_events(run_dir)))
        except (OSError, ValueError) as error:
            raise UsageError(str(error)) from error
    verdict = compare(steps[0], steps[1], gone_back=(again[0], again[1]))
    console().print(verdict_table(verdict, steps[0], steps[1], (str(options.run_a), str(options.run_b))))
    out(verdict.sentence)
    return 0 if verdict.equal else 1


COMMAND = Command("verify", "compare two recorded runs, bit by bit", _add_verify_options, verify)
