"""Lines that the command line itself prints."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from checkpointless.cli.values import UsageError

if TYPE_CHECKING:
    from checkpointless.doctor.findings import Finding

PROG = "checkpointless"
STDOUT = Path("-")  # as the name of a file that a command writes


def say(line: str) -> None:
    """Print a line about a job to standard error, besides what its ranks print."""
    shown = "".join(each if each.isprintable() or each in "\n\t" else repr(each)[1:-1] for each in line)
    shown = shown.replace("\n", "\n  ")  # what others said cannot begin a line of ours
    sys.stderr.write(f"{PROG}: {shown}\n")
    sys.stderr.flush()


def out(line: str) -> None:
    """Print a line of a command's result to standard output."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def write(path: Path, text: str) -> None:
    """Write a command's result to a file, or to standard output.

    Args:
        path: the file; :data:`STDOUT` for standard output.

    Raises:
        UsageError: the file cannot be written.
    """
    if path == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def report_error(message: str) -> None:
    """Print a message to standard error, in one line that says which program it comes from."""
    sys.stderr.write(f"{PROG}: error: {' '.join(message.split())}\n")


def say_worst(findings: Sequence[Finding], most: int) -> None:
    """Print the worst findings among other lines of the terminal, one line each.

    Args:
        findings: what was found.
        most: the largest number of lines.
    """
    from checkpointless.doctor.findings import headline, worst_first

    for each in worst_first(findings)[:most]:
        say(f"{headline(each)} (all: checkpointless doctor)")
