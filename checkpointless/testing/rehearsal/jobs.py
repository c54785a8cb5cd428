"""Runs the jobs of a rehearsal: at most a few at a time, watched, and stopped after the last step to compare."""

from __future__ import annotations

import importlib
import json
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from checkpointless.launcher.agent.launch import AgentProcess
from checkpointless.launcher.agent.launch_config import LaunchConfig, import_environment
from checkpointless.launcher.agent.ranks.preload import preload, preloads_of
from checkpointless.launcher.agent.ranks.rank_process import Script
from checkpointless.observability.telemetry.steps import STEPS_DIR

_MOST_ENTRIES = 20_000
_LOOK_EVERY_S = 0.1
_TELL_EVERY_S = 10.0
_END_S = 20.0  # for a job that was told to end
_TAIL_BYTES = 1 << 18


@dataclass(frozen=True)
class Plan:
    """What the jobs of a rehearsal have in common.

    Attributes:
        config: their configuration; run directory and faults are each job's own.
        steps: the largest number of steps that are compared.
        timeout_s: how many seconds a job may take.
        folder: where run directories and working directories are made.
        in_place: whether jobs run in this process's working directory.
    """

    config: LaunchConfig
    steps: int
    timeout_s: float
    folder: Path
    in_place: bool = False


@dataclass(frozen=True)
class Ended:
    """How a job ended.

    Attributes:
        name: its name.
        run_dir: its run directory.
        code: its exit status; None if it was stopped after the last step to compare.
        newest: the newest step that all ranks have recorded (0: none).
        seconds: how long it took.
        in_time: whether it ended in time.
        lines: what its agent said.
    """

    name: str
    run_dir: Path
    code: int | None
    newest: int
    seconds: float
    in_time: bool = True
    lines: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        """Whether it ended well, or made all steps that are compared."""
        return self.in_time and not self.code


def import_once(config: LaunchConfig, log: Path) -> LaunchConfig:
    """Import in this process what the ranks need, so that the jobs that are forked from it have it.

    A process that uses CUDA must not be forked: without ``config.cpu`` and with a GPU, each job imports by itself.

    Args:
        config: configuration of the jobs.
        log: file for what the imports print.

    Returns:
        The configuration of jobs that are forked from this process.
    """
    os.environ.update(import_environment(config.nproc_per_node, config.cpu))
    script = Script(config.script, config.script_args, config.module)
    names = preloads_of(script) if config.preload is None else config.preload
    with _printing_into(log):
        if config.cpu:
            from checkpointless.launcher.agent.ranks.preload import CPU, install_platform

            install_platform(CPU)
        preload(names, script)
        importlib.import_module("torch.distributed")  # of the agents; it takes longest
    return replace(config, preload=names, fork_here=True)


@contextmanager
def _printing_into(log: Path) -> Iterator[None]:
    """Redirect what this process prints to a file meanwhile."""
    kept = [os.dup(number) for number in (1, 2)]
    try:
        with log.open("ab") as file:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
        yield
    finally:
        for number, descriptor in zip((1, 2), kept, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)


class _Job:
    """A job that runs.

    Args:
        plan: what it has in common with others.
        name: its name, which its folders have, too.
        faults: specs of its faults.
    """

    def __init__(self, plan: Plan, name: str, faults: Sequence[str]) -> None:
        self.name = name
        self.run_dir = plan.folder / name
        self._plan = plan
        self._began_s = self._told_s = time.monotonic()
        self._kill_at_s: float | None = None
        self._in_time = True
        folder = None if plan.in_place else _linked_folder(Path.cwd(), plan.folder / "folders" / name)
        self._agent = AgentProcess(replace(plan.config, run_dir=self.run_dir, faults=tuple(faults)), folder)

    def look(self) -> Ended | None:
        """Return how the job ended; None if it runs."""
        code, now_s = self._agent.poll(), time.monotonic()
        first, newest = self.progress()
        if code is not None:
            was_stopped = self._kill_at_s is not None and self._in_time
            seconds = now_s - self._began_s
            code = None if was_stopped else code
            return Ended(self.name, self.run_dir, code, newest, seconds, self._in_time, self._agent.lines())
        if self._kill_at_s is not None:
            if now_s > self._kill_at_s:
                self._agent.kill()
        elif first is not None and newest >= first + self._plan.steps:  # all before are complete
            self.end()
        elif now_s - self._began_s > self._plan.timeout_s:
            self._in_time = False
            self.end()
        return None

    def end(self) -> None:
        """Ask the job to end; :meth:`look` kills it if it does not."""
        self._kill_at_s = time.monotonic() + _END_S
        self._agent.send(signal.SIGTERM)

    def news(self) -> str:
        """Return where the job stands, if it is time to say so; else ""."""
        now_s = time.monotonic()
        if now_s - self._told_s < _TELL_EVERY_S:
            return ""
        self._told_s = now_s
        _, newest = self.progress()
        where = f"step {newest} is made" if newest else "no step is made"
        return f"{self.name}: {where} after {now_s - self._began_s:.0f} s"

    def progress(self) -> tuple[int | None, int]:
        """Return the first step that was recorded (None: none), and the newest that all ranks have recorded."""
        files = [self.run_dir / STEPS_DIR / f"rank-{rank}.jsonl" for rank in self._plan.config.own_ranks]
        steps = [found for found in map(_steps_in, files) if found is not None]
        if len(steps) < len(files):
            return None, 0
        return min(first for first, _ in steps), min(newest for _, newest in steps)


def _steps_in(path: Path) -> tuple[int, int] | None:
    """Return the first and the last step in a rank's file; None if there is none."""
    try:
        with path.open("rb") as file:
            head = file.readline()
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            tail = file.read().rpartition(b"\n")[0].rpartition(b"\n")[2]
        return int(json.loads(head)["step"]), int(json.loads(tail)["step"])
    except (OSError, ValueError, KeyError):
        return None


def run_jobs(plan: Plan, jobs: Mapping[str, Sequence[str]], most: int, say: Callable[[str], None]) -> list[Ended]:
    """Run jobs until all have ended.

    Args:
        plan: what they have in common.
        jobs: the faults of each job by its name.
        most: the largest number of jobs that run at a time.
        say: called with a line when a job begins, ends, and every few seconds.

    Returns:
        How they ended, in their order.

    Raises:
        KeyboardInterrupt: Ctrl-C came; all jobs have been ended.
    """
    due, running, ended = deque(jobs.items()), list[_Job](), dict[str, Ended]()
    try:
        while due or running:
            while due and len(running) < most:
                name, faults = due.popleft()
                say(f"{name} begins" + (f": {' '.join(faults)}" if faults else ", without faults"))
                running.append(_Job(plan, name, faults))
            for job in list(running):
                found = job.look()
                if found is not None:
                    running.remove(job)
                    ended[job.name] = found
                news = _said_of(found) if found is not None else job.news()
                if news:
                    say(news)
            time.sleep(_LOOK_EVERY_S)
    finally:
        for job in running:
            job.end()
        while any([job.look() is None for job in running]):
            time.sleep(_LOOK_EVERY_S)
    return [ended[name] for name in jobs]


def _said_of(ended: Ended) -> str:
    took = f"after {ended.seconds:.1f} s"
    if not ended.in_time:
        return f"{ended.name} did not end in time and was stopped {took}, at step {ended.newest}"
    if ended.code:
        return f"{ended.name} failed {took}, at step {ended.newest}"
    if ended.code is None:
        return f"{ended.name} has made all steps to compare and was stopped, {took}"
    return f"{ended.name} is done at step {ended.newest}, {took}"


# --- A working directory for each job, with everything that is in the user's --------------------------------------


def _linked_folder(folder: Path, at: Path, most: int = _MOST_ENTRIES) -> Path:
    """Make a folder that looks like ``folder``, also on the way up, and takes what is newly written itself.

    Folders in it are real, and files are links, so that a new file is never in the user's folder. A path such as
    ``../data`` leads to the user's data. Hidden folders, and those beyond a limit, are links as a whole.

    Args:
        folder: the user's working directory.
        at: where to make it; the path of ``folder`` is appended.
        most: the largest number of entries that are made; what lies deeper is linked as a whole.

    Returns:
        The path of the new folder.
    """
    folder, at = folder.resolve(), at.resolve()
    twin = Path(f"{at}{folder}")
    twin.mkdir(parents=True)
    for parent, child in zip(folder.parents, [folder, *folder.parents]):
        for entry in _entries(parent):
            if entry.name != child.name:
                (Path(f"{at}{parent}") / entry.name).symlink_to(entry.path)
    made, due = 0, deque([folder])
    while due:
        source = due.popleft()
        for entry in _entries(source):
            made += 1
            there = Path(f"{at}{source}") / entry.name
            is_inner = entry.is_dir(follow_symlinks=False) and not entry.name.startswith((".", "__"))
            if is_inner and made < most and Path(entry.path) != at and Path(entry.path) not in at.parents:
                there.mkdir()
                due.append(Path(entry.path))
            else:
                there.symlink_to(entry.path)
    return twin


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return what is in a folder; nothing if it may not be read."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []
