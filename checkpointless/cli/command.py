"""What the command line has to know of a command.

Lines that the command line itself prints.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from checkpointless.cli.values import UsageError

PROG = "checkpointless"
_STDOUT, _STDERR = 1, 2
STDOUT = Path("-")  # as the name of a file that a command writes


def say(line: str) -> None:
    """Print a line about a job to standard error, if anybody takes it: the job goes on without."""
    shown = "".join(each if each.isprintable() or each in "\n\t" else repr(each)[1:-1] for each in line)
    shown = shown.replace("\n", "\n  ")  # what others said cannot begin a line of ours
    with contextlib.suppress(OSError):  # there is no other place for it
        sys.stderr.write(f"{PROG}: {shown}\n")
        sys.stderr.flush()


def open_standard_streams() -> None:
    """Open what was closed of the standard streams, and have nothing wait in a buffer of standard error."""
    while (free := os.open(os.devnull, os.O_RDWR)) <= _STDERR:  # otherwise a socket would take its number
        os.set_inheritable(free, True)
    os.close(free)
    if sys.stdout is None:
        sys.stdout = _unbuffered(_STDOUT)
    if sys.stderr is sys.__stderr__:  # a line that was refused once would be refused again when the process ends
        sys.stderr = _unbuffered(_STDERR)


def _unbuffered(descriptor: int) -> io.TextIOWrapper:
    raw = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(raw, errors="backslashreplace", write_through=True)  # type: ignore[type-var]


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
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{PROG}: error: {' '.join(message.split())}\n")


@dataclass(frozen=True)
class Command:
    """A command: what ``--help`` says of it, its options and its action.

    Attributes:
        what: what it does, in one line without a capital and a full stop.
        act: function that does it and returns the exit status; it raises :class:`UsageError` if the command cannot
            be done as asked.
        epilog: what its ``--help`` ends with.
    """

    name: str
    what: str
    add_options: Callable[[argparse.ArgumentParser], None]
    act: Callable[[argparse.Namespace], int]
    epilog: str = ""
