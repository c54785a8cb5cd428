"""Lines that the command line itself prints."""

from __future__ import annotations

import sys

PROG = "checkpointless"


def say(line: str) -> None:
    """Print a line about a job to standard error, besides what its ranks print."""
    shown = "".join(each if each.isprintable() or each in "\n\t" else repr(each)[1:-1] for each in line)
    sys.stderr.write(f"{PROG}: {shown}\n")
    sys.stderr.flush()


def out(line: str) -> None:
    """Print a line of a command's result to standard output."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def report_error(message: str) -> None:
    """Print a message to standard error, in one line that says which program it comes from."""
    sys.stderr.write(f"{PROG}: error: {' '.join(message.split())}\n")
