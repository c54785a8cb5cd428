"""Run a function in a process of its own, or in several ranks, and end it when its time is over, with its stacks.

As a script this file is such a process: ``python -m tests.gpu.isolated MODULE:FUNCTION ARGUMENTS RESULT SECONDS``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ports import free_port

Record = Callable[[str, object], None]  # of pytest's record_property
ROOT = Path(__file__).parents[2]
_GRACE_S = 10.0  # after its time a process writes its stacks and ends; then it is killed
_TAIL = 8_000  # characters of a log that a failure shows


def note(record: Record, found: Mapping[str, object]) -> None:
    for name, value in found.items():
        record(name, value)


class IsolatedError(AssertionError):
    """A process failed, or its time was over; the message has its log, with the stacks of all threads."""


@dataclass(frozen=True)
class Ended:
    """Describes how a process ended."""

    code: int
    result: Any  # None if the function did not return
    log: str
    seconds: float


def run(function: str, limit_s: float, *, env: Mapping[str, str] | None = None, **arguments: Any) -> Any:
    """Return what ``function`` ("module:name", of JSON arguments) returns in a process of its own.

    Raises IsolatedError if it raised, died, or had not ended in time.
    """
    (ended,) = end(function, limit_s, env=env, arguments=arguments)
    return _checked(function, [ended])[0]


def run_ranks(
    function: str, ranks: int, limit_s: float, *, env: Mapping[str, str] | None = None, **arguments: Any
) -> list[Any]:
    """Return what ``function`` returns in each of several processes, which can form a process group."""
    return _checked(function, end(function, limit_s, ranks=ranks, env=env, arguments=arguments))


def end(
    function: str,
    limit_s: float,
    *,
    ranks: int = 1,
    env: Mapping[str, str] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> list[Ended]:
    """Run ``function`` in processes of its own until they end, at most ``limit_s`` for all, and return how."""
    with tempfile.TemporaryDirectory(prefix="checkpointless-gpu-") as name:
        folder = Path(name)
        began_s = time.monotonic()
        port = str(free_port())
        processes = []
        for rank in range(ranks):
            command = [sys.executable, "-m", __name__, function, json.dumps(dict(arguments or {}))]
            command += [str(folder / f"{rank}.json"), str(limit_s)]
            of_rank = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            of_rank |= {"NCCL_DEBUG": "WARN", **(env or {})}
            with (folder / f"{rank}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        command,
                        cwd=ROOT,
                        env={**os.environ, **of_rank},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        return [_wait(each, folder / str(rank), began_s, limit_s) for rank, each in enumerate(processes)]


def _wait(process: subprocess.Popen[bytes], files: Path, began_s: float, limit_s: float) -> Ended:
    try:
        process.wait(max(0.0, began_s + limit_s + _GRACE_S - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass  # it is killed below, and its exit code says so
    seconds = time.monotonic() - began_s
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # also what it has started
    code = process.wait(_GRACE_S)
    result = files.with_suffix(".json")
    found = json.loads(result.read_text()) if code == 0 and result.exists() else None
    return Ended(code, found, files.with_suffix(".log").read_text(errors="replace"), seconds)


def _checked(function: str, ended: list[Ended]) -> list[Any]:
    bad = {rank: each for rank, each in enumerate(ended) if each.code != 0}
    if bad:
        logs = [
            f"--- process {rank}: exit code {each.code} after {each.seconds:.1f} s\n{each.log[-_TAIL:]}"
            for rank, each in bad.items()
        ]
        raise IsolatedError(f"{function} failed\n" + "\n".join(logs))
    return [each.result for each in ended]


def _be_process(function: str, arguments: str, result: str, limit_s: str) -> None:
    """Call the function; write down what it returns. When the time is over, write all stacks and end."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(float(limit_s), exit=True)
    module, _, name = function.partition(":")
    found = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    Path(result).write_text(json.dumps(found))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads that wait for a device would keep the process


if __name__ == "__main__":
    _be_process(*sys.argv[1:])
