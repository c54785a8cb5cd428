"""Runs whole jobs for the demo, chaos and rehearsals: forked from one process, watched, and judged afterwards."""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from checkpointless.faults.ledger import not_fired
from checkpointless.faults.spec import parse_all
from checkpointless.launcher.agent.launch import AgentProcess
from checkpointless.launcher.agent.launch_config import LaunchConfig, import_environment
from checkpointless.launcher.agent.ranks.preload import install_cpu_platform, preload, preloads_of
from checkpointless.launcher.agent.ranks.rank_process import Script
from checkpointless.observability.report.incidents import IncidentSummary, gone_back, summarize
from checkpointless.observability.report.verify import Steps, Verdict, What, compare
from checkpointless.observability.telemetry.events import Event, read_events
from checkpointless.observability.telemetry.steps import STEPS_DIR, read_steps

_MOST_ENTRIES = 20_000
_LOOK_EVERY_S = 0.05
_TELL_EVERY_S = 10.0
_END_S = 20.0  # for a job that was told to end
_TAIL_BYTES = 1 << 18


@dataclass(frozen=True)
class Job:
    """A job that is to be run."""

    name: str
    configs: Sequence[LaunchConfig]  # the configuration of each of its nodes, the first of which says how it ended
    limit_s: float  # how many seconds it may take
    steps: int | None = None  # the number of steps after which it is stopped; None: it ends by itself
    # where its working directory is made, with links to what is in this one; None: it has this one
    folder: Path | None = None


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    name: str
    run_dir: Path
    code: int | None  # None if it was stopped after its steps
    newest: int  # the newest step that all ranks have recorded (0: none)
    seconds: float
    in_time: bool = True  # whether it ended in time
    lines: tuple[str, ...] = ()  # what its agent said
    faults: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        """Whether it ended well, or made all steps that are compared."""
        return self.in_time and not self.code

    @cached_property
    def events(self) -> list[Event]:
        return read_events(self.run_dir)

    @cached_property
    def incidents(self) -> list[IncidentSummary]:
        return summarize(self.events)

    @property
    def missing(self) -> tuple[str, ...]:
        return not_fired(parse_all(self.faults, None, None), self.run_dir)

    def compare(self, calm: Steps, run: Steps | None = None, without: Set[What] = frozenset()) -> Verdict:
        """Compare ``run``, or all that it recorded, with what a run without faults recorded."""
        run = read_steps(self.run_dir) if run is None else run
        return compare(calm, run, without, gone_back=(frozenset(), gone_back(self.events)))


def import_once(config: LaunchConfig, log: Path) -> LaunchConfig:
    """Import what the ranks need, and return the configuration of jobs forked from here: no process with CUDA."""
    os.environ.update(import_environment(config.nproc_per_node, config.cpu))
    script = Script(config.script, config.script_args, config.module)
    names = preloads_of(script) if config.preload is None else config.preload
    with _printing_into(log):
        if config.cpu:
            install_cpu_platform()
        preload(names, script)
        importlib.import_module("torch.distributed")  # of the agents; it takes longest
    gc.collect()
    gc.freeze()  # each job's fork server would go through all of it
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


class _Running:
    """A job that runs."""

    def __init__(self, job: Job) -> None:
        self.job, self.run_dir = job, job.configs[0].run_dir
        self._began_s = self._told_s = time.monotonic()
        self._kill_at_s: float | None = None
        self._in_time = True
        self._shown = 0
        folder = None if job.folder is None else _linked_folder(Path.cwd(), job.folder)
        self._agents = [AgentProcess(config, folder) for config in job.configs]

    def look(self) -> Ended | None:
        runs, now_s = any([agent.poll() is None for agent in self._agents]), time.monotonic()
        first, newest = self.progress()
        steps, seconds = self.job.steps, now_s - self._began_s
        if not runs:
            code = None if self._kill_at_s is not None and self._in_time else self._agents[0].returncode
            lines, faults = self._agents[0].lines(), self.job.configs[0].faults
            return Ended(self.job.name, self.run_dir, code, newest, seconds, self._in_time, lines, faults)
        if self._kill_at_s is not None:
            if now_s > self._kill_at_s:
                self.kill()
        elif steps is not None and first is not None and newest >= first + steps:  # all before are complete
            self.end()
        elif seconds > self.job.limit_s:
            self._in_time = False
            self.end()
        return None

    def end(self) -> None:
        """Ask the job to end; :meth:`look` kills it if it does not."""
        self._kill_at_s = time.monotonic() + _END_S
        for agent in self._agents:
            agent.send(signal.SIGTERM)

    def kill(self) -> None:
        for agent in self._agents:
            agent.kill()

    def new_lines(self) -> Sequence[str]:
        """Return what the first agent has said since the last call."""
        lines = self._agents[0].lines()[self._shown :]
        self._shown += len(lines)
        return lines

    def news(self) -> str:
        """Return where the job stands, if it is time to say so; else ""."""
        now_s = time.monotonic()
        if now_s - self._told_s < _TELL_EVERY_S:
            return ""
        self._told_s = now_s
        _, newest = self.progress()
        where = f"step {newest} is made" if newest else "no step is made"
        return f"{self.job.name}: {where} after {now_s - self._began_s:.0f} s"

    def progress(self) -> tuple[int | None, int]:
        """Return the first step that was recorded (None: none), and the newest that all ranks have recorded."""
        ranks = [rank for config in self.job.configs for rank in config.own_ranks]
        files = [self.run_dir / STEPS_DIR / f"rank-{rank}.jsonl" for rank in ranks]
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


def run_jobs(
    jobs: Sequence[Job],
    most: int = 1,
    say: Callable[[str], None] = lambda _: None,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Ended]:
    """Run jobs, ``most`` at a time, until all have ended, also after Ctrl-C; ``tell`` gets their agents' lines."""
    due, running, ended = deque(jobs), list[_Running](), dict[str, Ended]()
    try:
        while due or running:
            while due and len(running) < most:
                job, faults = due[0], due[0].configs[0].faults
                say(f"{job.name} begins" + (f": {' '.join(faults)}" if faults else ", without faults"))
                running.append(_Running(due.popleft()))
            for each in list(running):
                found = each.look()
                for line in each.new_lines():
                    tell(line)
                if found is not None:
                    running.remove(each)
                    ended[found.name] = found
                news = _said_of(found) if found is not None else each.news()
                if news:
                    say(news)
            time.sleep(_LOOK_EVERY_S)
    finally:
        for each in running:
            each.end()
        while any([each.look() is None for each in running]):
            time.sleep(_LOOK_EVERY_S)
    return [ended[job.name] for job in jobs]


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
    """Make a folder of real folders, up to a limit, and links to the files of ``folder``, also on the way up.

    So a new file is never in the user's folder, and ``../data`` leads to the user's data.
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
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []
