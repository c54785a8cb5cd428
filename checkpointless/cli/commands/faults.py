"""The command ``faults``: a list of the faults that can be injected."""

from __future__ import annotations

import argparse

from checkpointless.cli.command import Command, out


def _add_faults_options(_parser: argparse.ArgumentParser) -> None:
    """Add nothing: the command has no options."""


def faults(_options: argparse.Namespace) -> int:
    """Show the kinds of faults, their phases and their expected outcomes."""
    from checkpointless.cli.tables import console, support_table
    from checkpointless.faults.spec import FaultPhase

    console().print(support_table())
    out(f"phases: {', '.join(phase.value for phase in FaultPhase)}")
    out("for example: --fault exception@forward:rank=2,step=7 --fault sigkill@optimizer:rank=1,step=5")
    return 0


COMMAND = Command("faults", "list the faults that can be injected", _add_faults_options, faults)
