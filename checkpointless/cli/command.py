"""Parts that all commands share: values of options, lines for the terminal, run directories. Nothing heavy."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from checkpointless.observability.telemetry.events import EVENTS_FILE


class UsageError(Exception):
    """Raised if what was asked for cannot be done; the message is one line that says what to do instead."""


def both(flag: str) -> tuple[str, ...]:
    """Return an option in torchrun's two spellings: with dashes, and with underscores."""
    return tuple(dict.fromkeys((flag, f"--{flag.removeprefix('--').replace('-', '_')}")))


def ranks(text: str) -> int:
    """Return the number of ranks of a node, as torchrun reads it: ``gpu``, ``cpu``, ``auto`` or a number."""

    cpus = len(os.sched_getaffinity(0))
    if text == "gpu":
        found = _count_cuda()
        if not found:
            raise argparse.ArgumentTypeError("this machine has no GPU that CUDA shows: give a number, or cpu")
        return found
    if text in ("cpu", "auto"):
        return (_count_cuda() if text == "auto" else 0) or cpus
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number of at least 1 nor gpu, cpu or auto")
    return positive(text)


def nodes(text: str) -> int:
    """Return the number of nodes; torchrun's ``MIN:MAX`` is one, too, if both are the same."""
    least, colon, most = text.partition(":")
    if not colon:
        return positive(text)
    if positive(least) != positive(most):
        raise argparse.ArgumentTypeError(
            f"{text}: the number of nodes is fixed here: --nnodes {most}, or --nnodes {least} with --spares for "
            "nodes that wait to replace a lost one"
        )
    return positive(most)


def positive(text: str) -> int:
    return _at_least(text, 1)


def count(text: str) -> int:
    return _at_least(text, 0)


def port(text: str) -> int:
    port = count(text)
    if port > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (0 to 65535)")
    return port


def _at_least(text: str, minimum: int) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 9 or int(text) < minimum:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {minimum}")
    return int(text)


def seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def modules(text: str) -> tuple[str, ...]:
    modules = tuple(module.strip() for module in text.split(","))
    if not all(part.isidentifier() for module in modules for part in module.split(".")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of modules with commas between them")
    return modules


# --- How many GPUs this machine has -------------------------------------------------------------------------------

_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # of NVIDIA, of WSL and of AMD


def _count_cuda() -> int:
    """Return the number of CUDA devices that a process sees; torch is imported only if there is a driver."""
    if not any(Path(driver).exists() for driver in _DRIVERS):
        return 0
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warnings about its own imports
        import torch
    return torch.cuda.device_count()  # asks NVML first, without initialising CUDA: ranks are forked from here


def has_cuda() -> bool:
    return _count_cuda() > 0


PROG = "checkpointless"
STDOUT = Path("-")  # as the name of a file that a command writes


def say(line: str) -> None:
    """Print a line about a job to standard error, if anybody takes it: the job goes on without."""
    shown = "".join(each if each.isprintable() or each in "\n\t" else repr(each)[1:-1] for each in line)
    shown = shown.replace("\n", "\n  ")  # what others said cannot begin a line of ours
    with contextlib.suppress(OSError):  # there is no other place for it
        sys.stderr.write(f"{PROG}: {shown}\n")
        sys.stderr.flush()


def out(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@dataclass(frozen=True)
class Command:
    """A command; ``act`` returns the exit status, or raises :class:`UsageError` if it cannot be done as asked."""

    name: str
    what: str
    add_options: Callable[[argparse.ArgumentParser], None]
    act: Callable[[argparse.Namespace], int]
    epilog: str = ""


# --- The run directory that a command reads or makes -------------------------------------------------------------

RUNS_DIR = Path("runs")


def new_run_dir(asked: Path | None, name: str, shared: bool = False) -> Path:
    """Make the directory of a new run, which one of several jobs gets; a ``shared`` one may hold files already."""
    started = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    numbers = ("", *(f"-{number}" for number in range(2, 1000)))
    places = [RUNS_DIR / f"{started}-{name}{number}" for number in numbers] if asked is None else [asked]
    for run_dir in places:
        try:
            run_dir.mkdir(parents=True, exist_ok=asked is not None)
            if asked is None or shared:
                return run_dir
            if not any(run_dir.iterdir()):
                (run_dir / EVENTS_FILE).touch(exist_ok=False)  # one of those who have found it empty succeeds
                return run_dir
        except FileExistsError:
            continue
        except OSError as error:
            raise UsageError(f"cannot make run directory {run_dir}: {error.strerror}") from error
    what = "is not empty: name a new one" if run_dir.is_dir() else "is a file: name another"
    raise UsageError(f"run directory {run_dir} {what}")
