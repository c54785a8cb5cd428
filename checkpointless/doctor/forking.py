"""Whether a zygote may fork ranks: what the modules that it imports do to CUDA, and which threads they start."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from checkpointless.agent.rank_program import import_environment
from checkpointless.agent.ranks.platforms import CPU
from checkpointless.agent.ranks.rank_process import Script
from checkpointless.agent.ranks.starters import zygote_env
from checkpointless.cuda_sign import TORCH_SIGN
from checkpointless.doctor.findings import Family, Finding, Severity
from checkpointless.telemetry.wording import duration, plural, printable

TIMEOUT_S = 300.0
_TELL_S = 2.0  # after which a person wonders whether something goes on
_SOURCE = "the imports, made in a child process"
_INSTEAD = "import it in the function that uses it, or leave it out of --preload"
_MOST_BYTES = 10**6  # of what the child may say
_LONGEST = 200


@dataclass(frozen=True)
class Trial:
    """What the imports did.

    Attributes:
        names: the names that were imported.
        failed: for each that could not be, one line that says why.
        cuda: how it shows that CUDA was initialised ("": it was not).
        cuda_by: module that did it.
        can_fork: whether a forked child may use CUDA, as far as torch knows.
        threads: name of each thread that was left running, and the module that started it.
        native_threads: number of threads that Python does not know.
        seconds: how many seconds all of it took.
        error: why the trial did not come to its end ("" if it did).
    """

    names: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    cuda: str = ""
    cuda_by: str = ""
    can_fork: bool = True
    threads: tuple[tuple[str, str], ...] = ()
    native_threads: int = 0
    seconds: float = 0.0
    error: str = ""


def judge(trial: Trial) -> list[Finding]:
    """Return whether ranks can be forked after these imports."""
    if trial.error:
        todo = "import less: --preload names what is imported once"
        return [_finding(Severity.WARNING, trial.error, todo)]
    findings = []
    anew = f"each replaced rank imports everything anew ({duration(trial.seconds)})"
    if trial.cuda and trial.can_fork and trial.cuda != TORCH_SIGN:
        seen = (
            f"importing {trial.cuda_by} initialised CUDA ({trial.cuda}), which torch does not know: "
            "forked ranks fail at their first use of CUDA"
        )
        findings.append(_finding(Severity.ERROR, seen, _INSTEAD))
    elif trial.cuda:
        seen = f"importing {trial.cuda_by} initialised CUDA ({trial.cuda}): {anew}"
        findings.append(_finding(Severity.WARNING, seen, _INSTEAD))
    elif not trial.can_fork:
        seen = f"torch says that forked ranks could not use CUDA: {anew}"
        todo = "look for an import that asks torch for its devices"
        findings.append(_finding(Severity.WARNING, seen, todo))
    for name, module in trial.threads:
        seen = f"importing {module} started the thread {name}: forked ranks lack it, and may wait for its locks"
        findings.append(_finding(Severity.WARNING, seen, f"start it when it is used, or {_INSTEAD}"))
    for why in trial.failed:
        findings.append(_finding(Severity.ADVICE, why, "leave it out of --preload, or make it importable"))
    native = f", with {plural(trial.native_threads, 'thread')} of libraries" if trial.native_threads > 0 else ""
    if not any(each.is_to_change for each in findings):
        seen = (
            f"{plural(len(trial.names), 'name')} imported in {duration(trial.seconds)}{native}; ranks can be forked"
        )
        findings.append(_finding(Severity.OK, seen))
    return findings


def read(
    preload: tuple[str, ...],
    script: Script | None,
    *,
    ranks: int,
    cpu: bool,
    progress: Callable[[str], None],
    timeout_s: float = TIMEOUT_S,
) -> Trial:
    """Import what a zygote would in a child process, and see what that does.

    Args:
        preload: names to import; empty: what the script imports from installed packages.
        script: what the ranks run; None: modules beside it are not found.
        ranks: number of ranks on the node.
        cpu: whether the job trains on CPUs (``--cpu``).
        progress: called with a line for people, when there was none for two seconds.
        timeout_s: how many seconds the imports may take.
    """
    ours, theirs = os.pipe()
    command = [sys.executable, "-m", "checkpointless.doctor.fork_trial", "--fd", str(theirs)]
    command += ["--parent", str(os.getpid()), "--preload", ",".join(preload)]
    command += ["--script", script.to_json()] if script is not None else []
    command += ["--platform", CPU] if cpu else []
    with tempfile.TemporaryFile() as errors, open(ours, "rb", buffering=0) as said:
        try:
            process = subprocess.Popen(
                command,
                env=zygote_env(import_environment(ranks, cpu)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=[theirs],
                start_new_session=True,
            )
        finally:
            os.close(theirs)
        heard = _Heard()
        try:
            for line in _lines(said.fileno(), time.monotonic() + timeout_s, lambda: progress(heard.progress())):
                heard.take(line)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # it has a session of its own
            process.wait()
        if heard.trial is not None:
            return heard.trial
        errors.seek(0)
        last = (errors.read()[-4096:].decode(errors="replace").strip().splitlines() or [""])[-1]
    return Trial(error=heard.error(process.returncode, last, timeout_s))


@dataclass
class _Heard:
    """What the child has said so far."""

    importing: str = ""
    failed: list[str] = field(default_factory=list)
    trial: Trial | None = None
    _began_s: float = field(default_factory=time.monotonic)

    def take(self, line: bytes) -> None:
        said: dict[str, Any] = json.loads(line)
        if "importing" in said:
            self.importing = f"{said['importing']} ({said['number'] + 1} of {said['of']})"
        elif "failed" in said:
            self.failed.append(printable(said["failed"], _LONGEST))
        else:
            self.trial = Trial(
                names=tuple(said["names"]),
                failed=tuple(self.failed),
                cuda=said["cuda"],
                cuda_by=printable(said["by"], _LONGEST),
                can_fork=said["can_fork"],
                threads=tuple((printable(n, _LONGEST), printable(by, _LONGEST)) for n, by in said["threads"]),
                native_threads=said["native"],
                seconds=said["seconds"],
            )

    def progress(self) -> str:
        return f"importing {self.importing or 'Python'}: {duration(time.monotonic() - self._began_s)} so far"

    def error(self, code: int, last: str, timeout_s: float) -> str:
        at = f" at {self.importing}" if self.importing else ""
        if time.monotonic() - self._began_s >= timeout_s:
            return f"the imports did not end within {timeout_s:g} s; they are{at}"
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return printable(f"the process that imports was {how}{at}{last and ': '}{last}", 2 * _LONGEST)


def _lines(descriptor: int, deadline_s: float, wait: Callable[[], None]) -> Iterator[bytes]:
    """Yield the lines that come, until the other end closes or the time is over; call ``wait`` in long pauses."""
    rest, size = b"", 0
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while (left_s := deadline_s - time.monotonic()) > 0 and size < _MOST_BYTES:
            if not selector.select(min(left_s, _TELL_S)):
                wait()
                continue
            data = os.read(descriptor, 64 * 1024)
            if not data:
                return
            size += len(data)
            *lines, rest = (rest + data).split(b"\n")
            yield from lines


def _finding(severity: Severity, seen: str, todo: str = "") -> Finding:
    return Finding(Family.FORKING, severity, seen, _SOURCE, todo)
