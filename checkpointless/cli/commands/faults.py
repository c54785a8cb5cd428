"""The command ``faults``: which faults can be caused on purpose."""

from __future__ import annotations

import argparse

from checkpointless.cli.command import Command
from checkpointless.cli.output import out


def add_faults_options(_parser: argparse.ArgumentParser) -> None:
    """Add nothing: the command has no options."""


def faults(_options: argparse.Namespace) -> int:
    """Show which faults can be caused, in which phases, and what is expected of each."""
    from checkpointless.cli.tables import console, support_table
    from checkpointless.faults.spec import FaultPhase

    console().print(support_table())
    out(f"phases: {', '.join(phase.value for phase in FaultPhase)}")
    out("for example: --fault exception@forward:rank=2,step=7 --fault sigkill@optimizer:rank=1,step=5")
    return 0


COMMAND = Command("faults", "list the faults that can be caused on purpose", add_faults_options, faults)
