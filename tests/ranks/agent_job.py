"""Start jobs under a real agent, watch them, and look for what they leave behind."""

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from checkpointless.faults.ledger import fired
from checkpointless.faults.spec import parse
from checkpointless.launcher.agent.ranks.preload import preloads_of
from checkpointless.launcher.agent.ranks.rank_process import Script
from checkpointless.observability.telemetry.events import read_events
from checkpointless.system.environment import TOKEN_ENV
from tests.ranks.agent_nursery import ForkedAgent

SCRIPTS = Path(__file__).parent / "agent_scripts"
TOKEN = "a secret of the tests that is long enough"
_MARKER = "CHECKPOINTLESS_TEST_JOB"


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


class Job:
    """Runs one of ``agent_scripts`` under an agent of its own, with further fields of ``LaunchConfig``.

    If the script imports torch, the ranks' zygote is forked from the agent (``fork_here``) unless ``options`` say
    otherwise; else it is an interpreter of its own, as ever.
    """

    def __init__(
        self,
        run_dir: Path,
        script: str,
        *args: str,
        nproc: int = 3,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        self.run_dir = run_dir
        self.marker, self.faults = uuid.uuid4().hex, options.get("faults", ())
        options = {"fork_here": imports_torch(SCRIPTS / script)} | options
        options |= {"run_dir": str(run_dir), "nproc_per_node": nproc, "script_args": args}
        options["script"] = str(SCRIPTS / script)
        self.process = ForkedAgent(options, {**os.environ, **(env or {}), _MARKER: self.marker})

    def end(self, timeout_s: float = 280, *, code: int | None = 0) -> Ended:
        """Wait for the end, with that ``code`` (None: any). Nothing may be left; at 0 all faults have happened."""
        try:
            out, err = self.process.communicate(timeout_s)
            ended = Ended(self.process.wait(timeout_s), out, err)
        except subprocess.TimeoutExpired as error:
            stacks = "".join(_described(each) for each in self.left())
            self.process.send_signal(signal.SIGKILL)
            logs = [f"--- {path.name}\n{path.read_text()}" for path in sorted(self.run_dir.glob("logs/*.log"))]
            raise AssertionError("\n".join([f"the job did not end in {timeout_s:g} s", stacks, *logs])) from error
        assert self.left() == []
        assert code in (ended.code, None), ended.err + ended.out
        if code == 0:
            assert fired(self.run_dir) == {fault: parse(fault).times for fault in self.faults}
        return ended

    def left(self) -> list[psutil.Process]:
        """Return every living process of the job, found by what it inherited: the tree may be broken."""
        found = [psutil.Process(self.process.pid)] if is_alive(self.process.pid) else []
        for process in psutil.process_iter():
            try:
                if process.environ().get(_MARKER) == self.marker and is_alive(process.pid):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def notes(self, kind: str, rank: int | None = None) -> list[dict[str, Any]]:
        lines = [
            json.loads(line)
            for path in sorted(self.run_dir.glob("notes-*.jsonl"))
            for line in path.read_text().rpartition("\n")[0].splitlines()  # without one that is being written
        ]
        return [n for n in lines if n["kind"] == kind and rank in (None, n["rank"])]

    def log(self, rank: int) -> str:
        """Return the log of a rank, empty while there is none, and between two of its files."""
        try:
            return (self.run_dir / "logs" / f"rank-{rank}.log").read_text()
        except FileNotFoundError:
            return ""

    def events(self, stage: str) -> list[Any]:
        return [event for event in read_events(self.run_dir) if event.stage == stage]

    def zygote(self) -> psutil.Process:
        (zygote,) = psutil.Process(self.process.pid).children()
        return zygote


class Coordinator:
    """Runs a coordinator in a process of its own, by a command that may begin with ``within``.

    Attributes:
        said: what it has said until it listened.
    """

    def __init__(self, endpoint: str, nnodes: int, nproc: int, *options: str, within: Sequence[str] = ()) -> None:
        where = ["--rdzv-endpoint", endpoint, "--nnodes", str(nnodes), "--nproc-per-node", str(nproc)]
        self._command = [*within, sys.executable, "-m", "checkpointless", "coordinator", *where, *options]
        self._listens = f"coordinating {nnodes} nodes of {nproc} ranks"
        self.start()

    def start(self) -> None:
        """Start it, also once more, and have it listen."""
        environment, self.said = {**os.environ, TOKEN_ENV: TOKEN}, list[str]()
        self.process = subprocess.Popen(self._command, env=environment, stderr=subprocess.PIPE, text=True)
        while self._listens not in (line := self.next_line()):
            self.said.append(line)
            assert line, "".join(["the coordinator has ended\n", *self.said])

    def next_line(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.readline()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def end(self, *, code: int | None = 0) -> str:
        """Wait for the end, with that ``code`` (None: any), and return what it says since it listened."""
        _, said = self.process.communicate(timeout=180)
        assert code in (self.process.returncode, None), said
        return said


def _described(process: psutil.Process) -> str:
    """Return what a process is and what the kernel knows of what it waits for."""
    try:
        waits = Path(f"/proc/{process.pid}/wchan").read_text()
        return f"{process.pid} ({process.status()}, {waits}): {' '.join(process.cmdline())[:200]}\n"
    except (OSError, psutil.Error):
        return ""


def imports_torch(script: Path) -> bool:
    """Return whether ranks of a script begin with torch: the nursery has it, an interpreter takes 3 s for it."""
    names = [name for name in preloads_of(Script(str(script))) if not name.startswith("checkpointless.launcher.")]
    return any(name.partition(".")[0] in ("torch", "checkpointless") for name in names)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
