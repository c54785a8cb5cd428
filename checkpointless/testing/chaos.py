"""Chaos: many small jobs with drawn faults, each compared with its expected outcome and with an undisturbed run."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from checkpointless.faults.chaos import HANGING, Case, Outcome, draw, outcome_of
from checkpointless.faults.spec import parse
from checkpointless.launcher.agent.launch_config import LaunchConfig
from checkpointless.observability.report.incidents import IncidentSummary
from checkpointless.observability.report.verify import Steps
from checkpointless.observability.telemetry.steps import read_steps
from checkpointless.system.environment import OMP_NUM_THREADS_ENV
from checkpointless.testing.demo.trainers import TRAINERS, Task, Trainer
from checkpointless.testing.jobs import Ended, Job, import_once, run_jobs

LIMIT_S = 150.0
_HEARTBEAT_S, _HANG_HEARTBEAT_S = 20.0, 6.0
_NODE_TIMEOUT_S, _REGROUP_S = 3.0, 60.0
_SMALL_BUCKETS = 262144  # bytes; so that a transfer has a middle


@dataclass(frozen=True)
class ChaosConfig:
    """Configuration of the cases to be run.

    Attributes:
        overlap: whether half of the cases have a second fault.
        only: number of the one case to be run; None: all cases.
    """

    cases: int
    seed: int
    overlap: bool
    only: int | None
    steps: int
    most_ranks: int
    run_dir: Path
    trainer: Trainer = TRAINERS["nemo"]

    def drawn(self) -> list[Case]:
        """Return the cases.

        Raises:
            ValueError: the cases cannot be drawn with this configuration.
        """
        numbers = range(self.cases) if self.only is None else (self.only,)
        return [
            draw(
                self.seed,
                number,
                steps=self.steps,
                overlap=self.overlap,
                most_ranks=self.most_ranks,
                scope=self.trainer.scope,
            )
            for number in numbers
        ]

    def repeat(self, case: Case) -> str:
        """Return the command that runs ``case`` again."""
        overlap = " --overlap" if self.overlap else ""
        overlap += f" --trainer {self.trainer.name}" if self.trainer is not TRAINERS["nemo"] else ""
        return (
            f"checkpointless demo --chaos {self.cases} --seed {self.seed}{overlap} --steps {self.steps} "
            f"--nproc {self.most_ranks} --chaos-case {case.number}"
        )


@dataclass(frozen=True)
class _Result:
    """Result of a case; ``seconds`` are those of its incidents."""

    case: Case
    problem: str = ""
    seconds: float | None = None


def run_chaos(config: ChaosConfig, console: Console) -> int:
    """Run all cases and show their results.

    Returns:
        0 if every case ended as it must, else 1.

    Raises:
        ValueError: the cases cannot be drawn with this configuration.
        ImportError: NeMo is not installed.
    """
    cases = config.drawn()
    shown = "one case" if config.only is not None else f"{len(cases)} cases"
    console.print(
        f"chaos: {shown} of seed {config.seed}, trainer {config.trainer.name}; faults will be injected; "
        "importing the frameworks once ..."
    )
    runner = _Runner(config)
    results = []
    for index, case in enumerate(cases, start=1):
        result = runner.run(case)
        results.append(result)
        _say(console, index, len(cases), result)
        if result.problem:
            console.print(f"    repeat it: {config.repeat(case)}")
        elif config.only is None:
            shutil.rmtree(runner.directory(case))
    console.print(_table(results))
    wrong = [result for result in results if result.problem]
    console.print(
        f"{len(results) - len(wrong)} of {len(results)} cases ended as they must"
        + (f"; logs of the others: {config.run_dir}" if wrong else "")
    )
    return 1 if wrong else 0


def _judge(case: Case, ended: Ended, calm: Steps) -> _Result:
    """Compare a job with its expected outcome and with a run without faults."""
    outcome = outcome_of(ended.code, ended.incidents) if ended.in_time and ended.code is not None else None
    problems = []
    if outcome is not case.outcome:
        found = f"it ended with code {ended.code}" if ended.in_time else "it did not end in time"
        found = outcome.value if outcome is not None else found
        problems.append(f"expected: {case.outcome.value}; found: {found}")
    if case.reason and case.reason not in "\n".join(ended.lines):
        problems.append(f"it does not say {case.reason!r}")
    problems += [f"fault {text} did not happen" for text in ended.missing]
    verdict = ended.compare(calm)
    # A job that is refused ends early, and its steps until then are the same.
    if not verdict.equal and (case.outcome is not Outcome.REFUSED or verdict.difference is not None):
        problems.append(verdict.sentence)
    return _Result(case, "; ".join(problems), _seconds(ended.incidents))


def _seconds(incidents: Sequence[IncidentSummary]) -> float | None:
    if not incidents or incidents[-1].end_ns is None:
        return None
    return (incidents[-1].end_ns - incidents[0].start_ns) / 1e9


class _Runner:
    """Runs the cases, each kind also once without faults, in processes that are forked from this one."""

    def __init__(self, config: ChaosConfig) -> None:
        self._config = config
        self._calm: dict[object, Steps] = {}
        os.environ[OMP_NUM_THREADS_ENV] = "1"  # otherwise sums would depend on the number of ranks of a node
        base = config.trainer.config(Task(2, config.steps), config.run_dir)
        self._base = replace(import_once(base, config.run_dir / "imports.txt"), regroup_timeout_s=_REGROUP_S)

    def run(self, case: Case) -> _Result:
        """Run a case; ``RuntimeError`` if the run without faults failed."""
        reference, directory = self._reference(case), self.directory(case)
        shutil.rmtree(directory, ignore_errors=True)
        (ended,) = run_jobs([Job(directory.name, self._configs(case, directory, faulty=True), LIMIT_S)])
        return _judge(case, ended, reference)

    def directory(self, case: Case) -> Path:
        """Return the run directory of a case."""
        return self._config.run_dir / f"case-{case.number}"

    def _reference(self, case: Case) -> Steps:
        key = case.layout.world_size, self._config.trainer.program(_task(case, None))
        if key not in self._calm:
            directory = self._config.run_dir / "calm" / str(len(self._calm))
            (ended,) = run_jobs([Job("calm", self._configs(case, directory, faulty=False), LIMIT_S)])
            if not ended.is_good:
                raise RuntimeError(f"the undisturbed run of {case.layout.text} failed; its logs: {directory}")
            self._calm[key] = read_steps(directory)
        return self._calm[key]

    def _configs(self, case: Case, directory: Path, *, faulty: bool) -> list[LaunchConfig]:
        nodes, spares = (case.nodes, case.spares) if faulty else (1, 0)
        meeting: Mapping[str, Any] = {}
        if nodes + spares > 1:
            meeting = {"rdzv_endpoint": f"127.0.0.1:{_port()}", "token": secrets.token_hex(32)}
        hangs = any(parse(text).kind in HANGING for text in case.faults)
        return [
            replace(
                self._base,
                nproc_per_node=case.layout.world_size // nodes,
                script_args=self._config.trainer.program(_task(case, directory / "nemo" if faulty else None))[1],
                run_dir=directory,
                heartbeat_timeout_s=_HANG_HEARTBEAT_S if hangs else _HEARTBEAT_S,
                node_timeout_s=_NODE_TIMEOUT_S,
                faults=case.faults if faulty else (),
                nnodes=nodes,
                node_rank=node,
                spares=spares,
                **meeting,
            )
            for node in range(nodes + spares)
        ]


def _task(case: Case, checkpoints: Path | None) -> Task:
    return Task(
        nproc=case.layout.world_size,
        steps=case.steps,
        layout=case.layout.sizes,
        dropout=case.dropout,
        holders=case.layout.instances,
        workers=case.workers,
        checksum=case.checksum,
        bucket_bytes=_SMALL_BUCKETS,
        checkpoint_every=case.checkpoint_every if checkpoints is not None else 0,
        checkpoints=checkpoints,
    )


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- showing ------------------------------------------------------------------------------------------------------


def _table(results: Iterable[_Result]) -> Table:
    """Return a table of faults by kind, phase and outcome, with the number of cases and their median seconds."""
    shown = Table("kind", "phase", "what came of it", "cases", "median s", title="chaos", title_justify="left")
    groups: dict[tuple[str, str, str], list[_Result]] = defaultdict(list)
    for result in results:
        outcome = "UNEXPECTED" if result.problem else result.case.outcome.value
        for spec in map(parse, result.case.faults):
            groups[spec.kind.value, spec.phase.value, outcome].append(result)
    for (kind, phase, outcome), group in sorted(groups.items()):
        seconds = [result.seconds for result in group if result.seconds is not None]
        median = f"{statistics.median(seconds):.2f}" if seconds else ""
        shown.add_row(kind, phase, outcome, str(len(group)), median)
    return shown


def _say(console: Console, index: int, count: int, result: _Result) -> None:
    case = result.case
    where = case.layout.text + (f", {case.nodes} nodes" if case.nodes > 1 else "")
    console.print(f"[{index}/{count}] case {case.number}: {where}: {' '.join(case.faults)}")
    seconds = "" if result.seconds is None else f" in {result.seconds:.2f} s"
    if result.problem:
        console.print(f"    UNEXPECTED: {result.problem}")
    else:
        console.print(f"    {case.outcome.value}{seconds}" + (f": {case.reason}" if case.reason else ""))
