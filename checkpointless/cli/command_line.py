"""The command line: ``checkpointless run | train | rehearse | demo | verify | report | ...``.

Each command imports what is heavy when it runs, so that ``--help`` and wrong options are answered at once.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import NoReturn

from checkpointless.cli.command import PROG, UsageError, out, say
from checkpointless.cli.commands import demo, rehearse, report, run, train

COMMANDS = (
    run.RUN,
    train.COMMAND,
    rehearse.COMMAND,
    run.COORDINATOR,
    run.MOVE,
    demo.COMMAND,
    report.VERIFY,
    report.REPORT,
    report.FAULTS,
    report.DOCTOR,
)
USAGE_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 128 + 2  # what a shell reports for a process that Ctrl-C ended
BROKEN_PIPE_EXIT_CODE = 128 + 13  # what a shell reports for a process that SIGPIPE ended

_STDOUT, _STDERR = 1, 2
_EPILOG = """\
examples:
  checkpointless demo                                 see it work: a small GPT, two faults, equal losses
  checkpointless run --nproc-per-node 8 train.py      run a script that uses `@HPWrapper()`
  checkpointless train tiny_gpt_cpu --cpu --nproc-per-node 4 trainer.max_steps=20
  checkpointless rehearse --nproc-per-node 2 train.py is this job exact under faults?
  checkpointless report runs/20260101T120000Z-train   what happened, and how long each stage took
  checkpointless verify runs/a runs/b                 the same losses and parameters, to the bit?
  checkpointless doctor --nproc-per-node 8            check what this node lacks for recoveries
  checkpointless faults                               list the faults that can be injected

`checkpointless COMMAND --help` explains a command.
"""


def _report_error(message: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{PROG}: error: {' '.join(message.split())}\n")


class _Parser(argparse.ArgumentParser):
    """Argument parser that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        _report_error(f"{message} (see `{self.prog} --help`)")
        sys.exit(USAGE_EXIT_CODE)

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """Report words that no option takes, with the option that the first of them is close to."""
        import difflib

        known = [name for action in self._actions for name in action.option_strings]
        close = difflib.get_close_matches(words[0].partition("=")[0], known, n=1, cutoff=0.8)
        hint = f"; did you mean {close[0]}?" if close else ""
        self.error(f"unrecognized arguments: {' '.join(words)}{hint}")


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help that shows one spelling of the options that torchrun has in two."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = copy.copy(action)
        shown.option_strings = [name for name in action.option_strings if "_" not in name]
        return super()._format_action_invocation(shown)


class _Version(argparse.Action):
    """Prints the versions that a report of a defect needs, without an import of torch."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        import platform

        ours, torch = _installed_version(PROG), _installed_version("torch")
        out(f"{PROG} {ours} (torch {torch}, Python {platform.python_version()})")
        parser.exit()


def _installed_version(distribution: str) -> str:
    """Return the version of an installed distribution; "not installed" if it is not."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit status: 2 after a line of what is wrong, 130 after one for Ctrl-C."""
    _open_standard_streams()
    parser = _parser()
    options, extra = parser.parse_known_args(argv)
    overrides = [text for text in extra if "=" in text and not text.startswith("-")]
    if options.command is train.COMMAND.act and len(overrides) == len(extra):
        options.overrides += overrides  # argparse takes only those before the first option
    elif extra:
        options.parser.refuse(extra)
    command: Callable[[argparse.Namespace], int] = options.command
    warnings.filterwarnings("ignore", "The pynvml package is deprecated", FutureWarning)  # torch imports it
    try:
        return command(options)
    except UsageError as error:
        _report_error(str(error))
        return USAGE_EXIT_CODE
    except KeyboardInterrupt:
        say("stopped by Ctrl-C")
        return INTERRUPTED_EXIT_CODE
    except BrokenPipeError:  # the reader of standard output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE_EXIT_CODE


def _open_standard_streams() -> None:
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


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROG,
        description="Training jobs that survive faults in memory: no checkpoint is read and no step is repeated.",
        epilog=_EPILOG,
        formatter_class=_Help,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="show the versions of checkpointless, torch and Python"
    )
    parsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        added = parsers.add_parser(
            command.name,
            help=command.what,
            description=command.what[0].upper() + command.what[1:] + ".",
            epilog=command.epilog,
            formatter_class=_Help,
            allow_abbrev=False,
        )
        added.set_defaults(command=command.act, parser=added)
        command.add_options(added)
    return parser
