"""Full tracebacks, one file per rank and generation in ``<run dir>/tracebacks``; the terminal shows the path."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import runpy
import traceback
import types
from pathlib import Path

from checkpointless.observability.telemetry.scribe import scribe
from checkpointless.system.environment import own_run_dir

logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parents[2]

TRACEBACKS_DIR = "tracebacks"


def without_own_frames(error: BaseException) -> BaseException:
    """Cut from the traceback of an exception the frames that led to the user's code: the package's and runpy's.

    Returns:
        The exception. Its traceback stays whole if no other code was on the way to where it was raised.
    """
    first = error.__traceback__
    while first is not None and _is_own(first.tb_frame.f_code):
        first = first.tb_next
    if first is not None or isinstance(error, SyntaxError):  # a script that cannot be compiled has no frame
        error.__traceback__ = first
    return error


def is_first_with(error: BaseException) -> bool:
    """Return whether no other process that shares the run directory has claimed this traceback, and claim it."""
    run_dir = own_run_dir()
    if run_dir is None:
        return True
    try:
        text = "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001 - whatever a script's exception raises when it is asked for its text
        return True
    name = hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:16]
    try:
        (run_dir / TRACEBACKS_DIR).mkdir(exist_ok=True)
        with (run_dir / TRACEBACKS_DIR / f"script-{name}.txt").open("x", errors="backslashreplace") as file:
            file.write(text)
    except FileExistsError:
        return False
    except OSError as problem:  # the disk: then it is printed once more
        logger.warning("a traceback could not be written: %s", problem)
    return True


def _is_own(code: types.CodeType) -> bool:
    return code.co_filename.startswith((f"{_PACKAGE}{os.sep}", "<frozen ")) or code.co_filename == runpy.__file__


def traceback_path(run_dir: Path, generation: int, rank: int) -> Path:
    """Return the path of the traceback of what ``rank`` raised in ``generation``, if it raised anything."""
    return run_dir / TRACEBACKS_DIR / f"generation-{generation}-rank-{rank}.txt"


def keep_traceback(generation: int, rank: int, text: str) -> None:
    """Queue a traceback to be written into this process's run directory, if it has one; never wait for the disk."""
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
