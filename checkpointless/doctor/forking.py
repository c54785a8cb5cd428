"""Whether the fork server may fork ranks: what its imports do to CUDA, and which threads they start.

``python -m checkpointless.doctor.forking`` is the child process that makes these imports. It writes JSON objects,
one per line, into a file that it inherits: what it is importing, and in the end the trial.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from checkpointless.doctor.findings import Family, Finding, Severity
from checkpointless.launcher.agent.launch_config import import_environment
from checkpointless.launcher.agent.ranks.preload import install_cpu_platform, preload, preloads_of
from checkpointless.launcher.agent.ranks.rank_process import Script
from checkpointless.launcher.agent.ranks.zygote import can_fork, zygote_env
from checkpointless.observability.telemetry.wording import duration, plural
from checkpointless.system.process_tree import die_with_parent

TORCH_SIGN = "torch.cuda.is_initialized()"  # what torch knows, it says to forked children
_INIT_SIGN = "cuInit"  # the driver has been asked for devices, and none of their memory is taken
_LIBCUDA = "libcuda.so.1"
_CUDA_SUCCESS, _CUDA_NOT_INITIALIZED = 0, 3  # of CUresult


def _cuda_sign() -> str:
    """Return how it shows that CUDA was initialised in this process; "" if it does not."""
    cuda = sys.modules.get("torch.cuda")
    if cuda is not None and getattr(cuda, "_initialized", False):
        return TORCH_SIGN
    try:
        driver = ctypes.CDLL(_LIBCUDA, mode=os.RTLD_NOLOAD | os.RTLD_NOW)  # only if somebody has loaded it
    except OSError:
        return ""
    context = ctypes.c_void_p()
    if driver.cuCtxGetCurrent(ctypes.byref(context)) == _CUDA_NOT_INITIALIZED:
        return ""
    return "a context of the CUDA driver" if context.value or _has_primary_context(driver) else _INIT_SIGN


def _has_primary_context(driver: ctypes.CDLL) -> bool:
    count, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    if driver.cuDeviceGetCount(ctypes.byref(count)) != _CUDA_SUCCESS:
        return False
    for device in range(count.value):
        code = driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
        if code == _CUDA_SUCCESS and active.value:
            return True
    return False


TIMEOUT_S = 300.0
#: Of the child: the file to write to, the parent's pid, ``cpu``, ``script`` and ``preload`` of :func:`read`. It is
#: JSON of the standard library, since msgspec refuses paths that are not UTF-8.
_Order: TypeAlias = tuple[int, int, bool, Script | None, tuple[str, ...]]
_INSTEAD = "import it in the function that uses it, or leave it out of --preload"


def _finding(severity: Severity, seen: str, todo: str = "") -> Finding:
    return Finding(Family.FORKING, severity, seen, "the imports, made in a child process", todo)


@dataclass(frozen=True)
class _Trial:
    """What the imports did: signs of CUDA, threads that were left and what started them, or why it is not known."""

    names: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    cuda: str = ""
    cuda_by: str = ""
    can_fork: bool = True
    threads: tuple[tuple[str, str], ...] = ()
    seconds: float = 0.0
    error: str = ""


def judge(trial: _Trial) -> list[Finding]:
    """Return whether ranks can be forked after these imports."""
    if trial.error:
        return [_finding(Severity.WARNING, trial.error, "import less: --preload names what is imported once")]
    findings = []
    cost = f"each replaced rank imports everything again ({duration(trial.seconds)})"
    by = f"importing {trial.cuda_by} initialised CUDA ({trial.cuda})"
    if trial.cuda and trial.can_fork and trial.cuda != TORCH_SIGN:
        seen = f"{by}, which torch does not know: forked ranks fail at their first use of CUDA"
        findings.append(_finding(Severity.ERROR, seen, _INSTEAD))
    elif trial.cuda:
        findings.append(_finding(Severity.WARNING, f"{by}: {cost}", _INSTEAD))
    elif not trial.can_fork:
        seen, todo = f"torch says that forked ranks could not use CUDA: {cost}", "look for an import that uses CUDA"
        findings.append(_finding(Severity.WARNING, seen, todo))
    for name, module in trial.threads:
        seen = f"importing {module} started the thread {name}: forked ranks lack it, and may wait for its locks"
        findings.append(_finding(Severity.WARNING, seen, f"start it when it is used, or {_INSTEAD}"))
    if not findings:
        seen = f"{plural(len(trial.names), 'name')} imported in {duration(trial.seconds)}; ranks can be forked"
        findings.append(_finding(Severity.OK, seen))
    todo = "leave it out of --preload, or make it importable"
    return [*findings, *(_finding(Severity.ADVICE, why, todo) for why in trial.failed)]


def read(
    preload: tuple[str, ...], script: Script | None, *, ranks: int, cpu: bool, timeout_s: float = TIMEOUT_S
) -> _Trial:
    """Import what the fork server would in a child process (no ``preload``: what ``script`` imports)."""
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as errors:
        order = json.dumps(msgspec.to_builtins((said.fileno(), os.getpid(), cpu, script, preload)))
        process = subprocess.Popen(
            [sys.executable, "-m", "checkpointless.doctor.forking", order],
            env=zygote_env(import_environment(ranks, cpu)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=[said.fileno()],
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_s)
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        except subprocess.TimeoutExpired:
            how = f"did not end within {timeout_s:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what the imports have started
            process.wait()
        said.seek(0)
        errors.seek(0)
        lines = [json.loads(line) for line in said.read().splitlines()]
        reasons = errors.read()[-4096:].decode(errors="replace").strip().splitlines()
    if lines and "names" in lines[-1]:
        return msgspec.convert(lines[-1], _Trial)
    at = f" at {lines[-1]['importing']}" if lines else ""
    return _Trial(error=f"the process that imports {how}{at}{f': {reasons[-1]}' if reasons else ''}")


class _Watch:
    """Notes signs of CUDA and new threads, and after which import they came."""

    def __init__(self) -> None:
        self.cuda = ("", "")
        self._threads: dict[threading.Thread, str] = dict.fromkeys(threading.enumerate(), "")

    def look(self, name: str) -> None:
        """Note what is new after the import of ``name``."""
        if not self.cuda[0] and (how := _cuda_sign()):
            self.cuda = how, name
        for thread in threading.enumerate():
            self._threads.setdefault(thread, name)

    def threads(self) -> tuple[tuple[str, str], ...]:
        """Return the name of each thread that an import has started and that goes on, and the import."""
        return tuple((thread.name, by) for thread, by in self._threads.items() if by and thread.is_alive())


def _main() -> None:
    """Import, fork once, and write down what was seen."""
    descriptor, parent, cpu, script, names = msgspec.convert(json.loads(sys.argv[1]), _Order)
    die_with_parent(parent)
    os.set_inheritable(descriptor, False)

    def say(fields: _Trial | dict[str, str]) -> None:
        os.write(descriptor, (json.dumps(msgspec.to_builtins(fields)) + "\n").encode())

    failed: dict[str, str] = {}
    logging.getLogger(preload.__module__).addHandler(logging.NullHandler())  # else they were why this process ends
    began_s = time.monotonic()
    if not names and script is not None:
        names = preloads_of(script)
    watch = _Watch()
    for number, name in enumerate(names, start=1):
        say({"importing": f"{name} ({number} of {len(names)})"})
        failed |= preload((name,), script)
        watch.look(name)
    if cpu:
        install_cpu_platform()
        watch.look("the CPU platform")
    seconds = time.monotonic() - began_s
    trial = _Trial(names, tuple(failed.values()), *watch.cuda, can_fork(), watch.threads(), seconds)
    say(trial)
    os._exit(0)  # what was imported may take long to shut down


if __name__ == "__main__":
    _main()
