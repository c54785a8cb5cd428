"""Sets up the process of a rank, then runs the user's script in it.

``python -m checkpointless.launcher.agent.ranks.rank_process`` runs a rank in a fresh interpreter where forking is
not possible.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import io
import json
import logging
import os
import runpy
import signal
import sys
import traceback
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from checkpointless.launcher.agent.ranks.platforms import install_platform
from checkpointless.launcher.agent.ranks.script_end import DEFAULT_EXIT_GRACE_S, ScriptEnd
from checkpointless.launcher.client.agent_client import AgentClient
from checkpointless.launcher.protocol.board import Board
from checkpointless.launcher.protocol.causes import exit_code
from checkpointless.observability.telemetry.log_relay import LogRelay, apply_log_level, uninstall_relays
from checkpointless.observability.telemetry.tracebacks import is_first_with, without_own_frames
from checkpointless.system import temp_folder
from checkpointless.system.environment import AGENT_FD_ENV, BOARD_FD_ENV, EXIT_GRACE_ENV, RANK_ENV, own_generation
from checkpointless.system.signals import STACKS_SIGNAL

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_ORPHAN_EXIT_CODE = 1


@dataclass(frozen=True)
class Script:
    """What the ranks run, as it is given to ``python``.

    Attributes:
        target: path of a script, or name of a module.
        args: arguments of the script or module.
        module: whether ``target`` is a module (``python -m``).
    """

    target: str
    args: tuple[str, ...] = ()
    module: bool = False

    def to_json(self) -> str:
        """Return the script as text for a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Script:
        """Undo :meth:`to_json`."""
        body = json.loads(text)
        return cls(body["target"], tuple(body["args"]), body["module"])


def die_with_parent(parent_pid: int, by: int = signal.SIGKILL) -> None:
    """Have the kernel send this process the signal ``by`` when its parent ends, for whatever reason."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # the parent ended before the kernel was asked
        os._exit(_ORPHAN_EXIT_CODE)


def name_process(name: str) -> None:
    """Give this process the name that ``ps``, ``top`` and ``pgrep`` show, of which the kernel takes 15 letters."""
    try:
        Path("/proc/self/comm").write_text(name)
    except OSError as error:  # no /proc, or a sandbox: the name is for people
        logger.info("the process keeps its name: %s", error)


def run_script(script: Script) -> NoReturn:
    """Run ``script`` as ``__main__``, then exit the process with the code that ``python`` would give.

    The process is named after its rank, and writes its stacks when the agent asks for them.
    """
    uninstall_relays()
    apply_log_level()
    faulthandler.register(STACKS_SIGNAL, file=2)
    end = ScriptEnd(Board.from_environment(), float(os.environ.get(EXIT_GRACE_ENV, DEFAULT_EXIT_GRACE_S)))
    name_process(f"ckpl-rank-{os.environ.get(RANK_ENV, '')}")
    LogRelay().install()
    for stream in (sys.stdout, sys.stderr):  # pipes; what a rank has printed must not be lost with it
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    # A preloaded module that is run as the script was imported before, which is the purpose of preloading.
    warnings.filterwarnings("ignore", message=".*found in sys.modules after import", category=RuntimeWarning)
    try:
        _run(script, end)
    except BaseException:  # noqa: BLE001 - the edge of the process
        traceback.print_exc()
    end.finish()


def _run(script: Script, end: ScriptEnd) -> None:
    """Run the script; its end is noted while its variables live, for their destructors may hang."""
    sys.argv = [script.target, *script.args]
    try:
        if script.module:
            sys.path[0] = os.getcwd()
            _variables = runpy.run_module(script.target, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(script.target).resolve().parent)
            _variables = runpy.run_path(script.target, run_name="__main__")
    except BaseException as error:  # noqa: BLE001 - as the interpreter does at its top
        end.begin(_code_of(error))
    else:
        end.begin(0)


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
    """Print the traceback of what has ended the script, unless another rank of the node prints the same.

    A script that cannot be compiled or imported is not tried again: the agent hears of it.
    """
    without_own_frames(error)
    if is_first_with(error):
        sys.excepthook(type(error), error, error.__traceback__)
    else:
        last = "".join(traceback.format_exception_only(error)).rstrip().rpartition("\n")[2]
        sys.stderr.write(f"{last} (the same traceback is printed once)\n")
    if isinstance(error, (SyntaxError, ImportError)):
        client = AgentClient.from_environment()
        if client is not None:
            rank = os.environ.get(RANK_ENV, "0")
            client.give_up(own_generation(), f"rank {rank} cannot run the script: {type(error).__name__}: {error}")


def process_parser() -> argparse.ArgumentParser:
    """Return what parses the options that the agent gives each process that is to run the script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--platform")
    parser.add_argument("--script", type=Script.from_json, required=True)
    parser.add_argument("--temp-folder", type=Path)
    return parser


def main() -> NoReturn:
    """Run one rank in this interpreter."""
    options = process_parser().parse_args()
    die_with_parent(options.parent)
    for name in (AGENT_FD_ENV, BOARD_FD_ENV):
        os.set_inheritable(int(os.environ[name]), False)
    temp_folder.use(options.temp_folder)
    if options.platform is not None:
        install_platform(options.platform)
    run_script(options.script)


if __name__ == "__main__":
    main()
