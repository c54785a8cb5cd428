"""What the benchmarks share: jobs that end, marks on the machine's monotonic clock, and what machine it is."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
TARGETS = Path(__file__).resolve().parent / ".venvs"
BENCHMARK_ID_ENV = "CHECKPOINTLESS_BENCHMARK_ID"
_POLL_S = 0.05
_END_S = 5.0


@dataclass(frozen=True)
class Mark:
    """Something that a rank wrote down.

    Attributes:
        what: its name.
        rank: who wrote it.
        at_s: when, in seconds of the monotonic clock, which all processes of a machine share.
        detail: what else was written.
    """

    what: str
    rank: int
    at_s: float
    detail: Mapping[str, Any]


class Marks:
    """Where one rank writes its marks, one JSON line each, in the page cache before the call returns.

    Args:
        directory: of the run; each rank has a file of its own.
        rank: the rank, under which the file is named, over all its processes.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self.rank = rank
        self._path = directory / f"marks-{rank}.jsonl"

    def write(self, what: str, **detail: Any) -> None:
        """Write down that ``what`` happens now."""
        line = json.dumps({"what": what, "rank": self.rank, "at_s": time.monotonic(), "detail": detail}) + "\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)


def read_marks(directory: Path) -> list[Mark]:
    """All marks of a run, in the order of time."""
    lines = [
        line for path in directory.glob("marks-*.jsonl") for line in path.read_text().splitlines(keepends=True)
    ]
    whole = (line for line in lines if line.endswith("\n"))  # the last one may be being written
    return sorted((Mark(**json.loads(line)) for line in whole), key=lambda mark: mark.at_s)


class Job:
    """Processes that are started together and are all gone after the ``with`` block.

    Args:
        commands: what to start.
        environments: of each, on top of this process's.
        log: where their output goes.
    """

    def __init__(
        self, commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], log: Path
    ) -> None:
        self._commands = commands
        self._environments = environments
        self._log = log
        self._id = uuid.uuid4().hex
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Job:
        with self._log.open("ab") as log:
            for command, environment in zip(self._commands, self._environments):
                self._processes.append(
                    subprocess.Popen(
                        command,
                        env={**os.environ, **environment, BENCHMARK_ID_ENV: self._id},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs([psutil.Process(p.pid) for p in self._processes if p.poll() is None], _END_S)
        for left in [*alive, *self._left()]:
            try:
                left.kill()
            except psutil.NoSuchProcess:
                continue
        for process in self._processes:
            process.wait(_END_S)

    def kill(self) -> None:
        """Kill every process of the job at once, as the loss of a machine does."""
        for process in self._left():
            with suppress(psutil.NoSuchProcess):
                process.kill()

    @property
    def ended(self) -> bool:
        """Whether every process that was started here has ended."""
        return all(process.poll() is not None for process in self._processes)

    def exit_codes(self) -> list[int | None]:
        """Of each process; None while it runs."""
        return [process.poll() for process in self._processes]

    def _left(self) -> Iterator[psutil.Process]:
        """Processes of this job, also those that have gone into a session of their own."""
        for process in psutil.process_iter():
            try:
                if process.environ().get(BENCHMARK_ID_ENV) == self._id:
                    yield process
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue


@contextmanager
def folder_of_runs(keep: Path | None, prefix: str) -> Iterator[Path]:
    """Where the runs' logs and events go, which an error of a benchmark names.

    Args:
        keep: the folder. None: one that is gone after the ``with`` block, unless the block raises an error.
        prefix: of the name of such a folder.
    """
    folder = (keep or Path(tempfile.mkdtemp(prefix=prefix))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    except Exception:
        progress(f"what was written until now is in {folder}")
        raise
    except BaseException:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if keep is None:
        shutil.rmtree(folder, ignore_errors=True)


def install_beside(target: Path, *packages: str) -> None:
    """Put what a benchmark compares with where only it sees it, without what it depends on.

    Args:
        target: a directory; nothing is done if it is there.
        packages: for ``pip``.

    Raises:
        SystemExit: they cannot be installed.
    """
    if target.is_dir():
        return
    progress(f"installing {packages[0]} into {target}")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
    if subprocess.run([*pip, *packages], check=False).returncode != 0:
        raise SystemExit(f"{packages[0]} could not be installed into {target}")


def search_path(*before: Path) -> str:
    """`PYTHONPATH` for a job: `before`, the repository, and what this process has."""
    return os.pathsep.join([*map(str, before), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def wait_for(condition: Any, timeout_s: float) -> bool:
    """Wait until ``condition()`` is true; False if that takes longer than ``timeout_s``."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True


def machine(distributions: Sequence[str]) -> dict[str, Any]:
    """The date, this machine, and the versions of what is compared."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": models[0].partition(":")[2].strip() if models else platform.processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
        "load_at_start": os.getloadavg()[0],
        "versions": {name: importlib.metadata.version(name) for name in distributions},
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def shown(values: Sequence[float]) -> str:
    """Median and range, in seconds, for a table."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})" if values else "-"


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--repeats", type=int, default=5, metavar="N", help="per case and side (default: 5)")
    made.add_argument("--json", type=Path, metavar="FILE", help="where the results go (default: only shown)")
    made.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs' logs and events here")
    return made


def progress(line: str) -> None:
    """Say what is going on."""
    print(f"[{datetime.now().strftime('%H:%M:%S')}] {line}", flush=True)


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C ends the benchmark in one line; its jobs are gone by then."""
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
