"""Sets up the process of a rank, then runs the user's script in it."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import hashlib
import io
import logging
import os
import runpy
import signal
import sys
import threading
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from checkpointless.launcher.client.agent_client import AgentClient
from checkpointless.launcher.protocol.board import Board
from checkpointless.launcher.protocol.causes import exit_code
from checkpointless.launcher.protocol.messages import GiveUp
from checkpointless.observability.telemetry.scribe import (
    TRACEBACKS_DIR,
    LogRelay,
    apply_log_level,
    flush_all,
    without_own_frames,
)
from checkpointless.system.environment import RANK_ENV, own_generation, own_run_dir
from checkpointless.system.signals import STACKS_SIGNAL
from checkpointless.system.threads import abandoned, waited_for

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Script:
    """What the ranks run, as it is given to ``python``: a script, or a module (``python -m``)."""

    target: str
    args: tuple[str, ...] = ()
    module: bool = False


def _name_process(name: str) -> None:
    """Give this process the name that ``ps``, ``top`` and ``pgrep`` show, of which the kernel takes 15 letters."""
    try:
        Path("/proc/self/comm").write_text(name)
    except OSError as error:  # no /proc, or a sandbox: the name is for people
        logger.info("the process keeps its name: %s", error)


def run_script(script: Script) -> NoReturn:
    """Run ``script`` as ``__main__``, then exit the process with the code that ``python`` would give."""
    apply_log_level()
    faulthandler.register(STACKS_SIGNAL, file=2)
    board = Board.from_environment()
    _name_process(f"ckpl-rank-{os.environ.get(RANK_ENV, '')}")
    LogRelay().install()
    for stream in (sys.stdout, sys.stderr):  # pipes; what a rank has printed must not be lost with it
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    # A preloaded module that is run as the script was imported before, which is the purpose of preloading.
    warnings.filterwarnings("ignore", message=".*found in sys.modules after import", category=RuntimeWarning)
    code = 1
    try:
        code = _run(script, board)
        try:
            _wait_for_threads()
        finally:  # also after Ctrl-C
            atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001 - the edge of the process
        traceback.print_exc()
        code = code or 1
    finally:  # the interpreter is not shut down: with large frameworks that takes longer than most recoveries
        flush_all()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # the script closed or replaced it
                stream.flush()
        os._exit(code)


def _run(script: Script, board: Board | None) -> int:
    """Run the script and return its exit code, which is on the board while the destructors of its variables run."""
    code = 0
    sys.argv = [script.target, *script.args]
    try:
        if script.module:
            sys.path[0] = os.getcwd()
            _variables = runpy.run_module(script.target, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(script.target).resolve().parent)
            _variables = runpy.run_path(script.target, run_name="__main__")
    except BaseException as error:  # noqa: BLE001 - as the interpreter does at its top
        code = _code_of(error)
    if board is not None:
        board.set_exit_code(code)
    return code


def _wait_for_threads() -> None:
    """Wait for the threads that Python waits for, but not for those that an earlier entry of the block has left."""
    for call in reversed(threading._threading_atexits):  # type: ignore[attr-defined]  # executors end their work
        call()
    while threads := waited_for().difference(abandoned):
        threads.pop().join()


def _code_of(error: BaseException) -> int:
    """Print why the script has ended as the interpreter would, and return its exit code."""
    if isinstance(error, SystemExit):
        if not isinstance(error.code, int | None):
            sys.stderr.write(f"{error.code}\n")
        return exit_code(error)
    if isinstance(error, KeyboardInterrupt):
        traceback.print_exc()
        return 128 + signal.SIGINT
    _report(error)
    return 1


def _report(error: BaseException) -> None:
    """Print what has ended the script, once per node; tell the agent of an import that would fail again."""
    without_own_frames(error)
    if _is_first_with(error):
        sys.excepthook(type(error), error, error.__traceback__)
    else:
        last = "".join(traceback.format_exception_only(error)).rstrip().rpartition("\n")[2]
        sys.stderr.write(f"{last} (the same traceback is printed once)\n")
    if isinstance(error, (SyntaxError, ImportError)):
        client = AgentClient.from_environment()
        if client is not None:
            rank = os.environ.get(RANK_ENV, "0")
            reason = f"rank {rank} cannot run the script: {type(error).__name__}: {error}"
            client.send(GiveUp(own_generation(), reason))


def _is_first_with(error: BaseException) -> bool:
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
