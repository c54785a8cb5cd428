"""Full tracebacks, one file per rank and generation in ``<run dir>/tracebacks``; the terminal shows the path."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

from checkpointless.environment import own_run_dir
from checkpointless.telemetry.scribe import scribe

logger = logging.getLogger(__name__)

TRACEBACKS_DIR = "tracebacks"


def traceback_path(run_dir: Path, generation: int, rank: int) -> Path:
    """Return the path of the traceback of what ``rank`` raised in ``generation``, if it raised anything."""
    return run_dir / TRACEBACKS_DIR / f"generation-{generation}-rank-{rank}.txt"


def keep_traceback(generation: int, rank: int, text: str) -> None:
    """Queue a traceback to be written into this process's run directory, if it has one; never wait for the disk.

    Args:
        generation: generation that the exception ended.
        rank: rank that raised the exception.
        text: traceback, as Python prints it.
    """
    run_dir = own_run_dir()
    if run_dir is None:
        return
    if not scribe.put(functools.partial(_write, traceback_path(run_dir, generation, rank), rank, text)):
        logger.warning("rank %d: its traceback is not written, since too much waits for the disk\n%s", rank, text)


def _write(path: Path, rank: int, text: str) -> None:
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, errors="backslashreplace")
    except OSError as error:
        logger.warning("rank %d: its traceback could not be written: %s\n%s", rank, error, text)
