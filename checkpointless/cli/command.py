"""What the command line has to know of a command."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A command: what ``--help`` says of it, its options and its action.

    Attributes:
        name: word that calls it.
        what: what it does, in one line without a capital and a full stop.
        add_options: function that adds its options to its parser.
        act: function that does it and returns the exit status; it raises :class:`UsageError` if the command cannot
            be done as asked.
        epilog: what its ``--help`` ends with.
    """

    name: str
    what: str
    add_options: Callable[[argparse.ArgumentParser], None]
    act: Callable[[argparse.Namespace], int]
    epilog: str = ""
