"""The run directory that a command reads or makes."""

from __future__ import annotations

import os
from datetime import datetime, timezone
from pathlib import Path

from checkpointless.cli.values import UsageError
from checkpointless.observability.telemetry.events import EVENTS_FILE

RUNS_DIR = Path("runs")


def check_run_dir(run_dir: Path) -> None:
    """Check that there is such a run directory.

    Raises:
        UsageError: it does not exist.
    """
    if not run_dir.is_dir():
        raise UsageError(f"there is no run directory {run_dir}")


def check_can_be_made(run_dir: Path | None) -> None:
    """Check that nothing known already prevents a run directory from being created.

    Args:
        run_dir: directory that the user asked for; None: one under the working directory.

    Raises:
        UsageError: the run directory cannot be created.
    """
    places = [] if run_dir is None else [run_dir, *run_dir.parents]
    there = next((place for place in places if place.exists()), Path.cwd())
    if not there.is_dir():
        raise UsageError(f"cannot make run directory {run_dir}: {there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"cannot make run directory {run_dir}: nothing may be written into {there}")


def new_run_dir(asked: Path | None, name: str, shared: bool = False) -> Path:
    """Make the directory of a new run; refuse one that already holds a run, because the two would mix.

    Of several jobs that ask for one directory at the same time, one gets it.

    Args:
        asked: directory that the user asked for; None: a new one under :data:`RUNS_DIR`.
        shared: whether other nodes of the same run, or this node's predecessor, may have written into it.

    Raises:
        UsageError: the directory that was asked for holds a run, or cannot be made.
    """
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
