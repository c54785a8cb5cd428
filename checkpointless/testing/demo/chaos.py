"""Chaos: many small jobs with drawn faults, each compared with its expected outcome and with an undisturbed run."""

from __future__ import annotations

import gc
import importlib
import json
import os
import secrets
import shutil
import signal
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from checkpointless.faults.chaos import HANGING, Case, Outcome, draw, outcome_of
from checkpointless.faults.ledger import not_fired
from checkpointless.faults.spec import parse, parse_all
from checkpointless.launcher.agent.launch import AgentProcess
from checkpointless.launcher.agent.launch_config import LaunchConfig
from checkpointless.observability.report.incidents import IncidentSummary, summarize
from checkpointless.observability.report.verify import Steps, compare
from checkpointless.observability.telemetry.events import read_events
from checkpointless.observability.telemetry.steps import read_steps
from checkpointless.system.environment import CPU_ENV, OMP_NUM_THREADS_ENV, YES
from checkpointless.testing.demo.trainers import TRAINERS, Task, Trainer

_REAP_EVERY_S = 0.02
_LEAVE_S = 10.0  # for agents that were interrupted together with this process
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
    """Result of a case.

    Attributes:
        outcome: outcome of the job; None if it is none of the known outcomes.
        problem: what is wrong with the result ("" if nothing is).
        seconds: time from the first fault to the end of the first step after the last incident; None if there was
            no such step.
        took_s: duration of the job, in seconds.
    """

    case: Case
    outcome: Outcome | None
    problem: str = ""
    seconds: float | None = None
    took_s: float = field(default=0.0, compare=False)


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
        _write(results, config.run_dir / "chaos.json")
    console.print(_table(results))
    wrong = [result for result in results if result.problem]
    console.print(
        f"{len(results) - len(wrong)} of {len(results)} cases ended as they must"
        + (f"; logs of the others: {config.run_dir}" if wrong else "")
    )
    return 1 if wrong else 0


def _judge(case: Case, ended: _Ended, run_dir: Path, calm: Steps) -> _Result:
    """Compare a job with its expected outcome and with a run without faults.

    Args:
        ended: how the agent of node 0 ended.
    """
    incidents = summarize(read_events(run_dir))
    outcome = None if ended.code is None else outcome_of(ended.code, incidents)
    problems = []
    if outcome is not case.outcome:
        found = "it did not end in time" if ended.code is None else f"it ended with code {ended.code}"
        found = outcome.value if outcome is not None else found
        problems.append(f"expected: {case.outcome.value}; found: {found}")
    if case.reason and case.reason not in "\n".join(ended.said):
        problems.append(f"it does not say {case.reason!r}")
    problems += [f"fault {text} did not happen" for text in not_fired(parse_all(case.faults, None, None), run_dir)]
    problems += _differences(case, read_steps(run_dir), calm)
    return _Result(case, outcome, "; ".join(problems), _seconds(incidents))


def _differences(case: Case, steps: Steps, calm: Steps) -> list[str]:
    verdict = compare(calm, steps)
    if verdict.difference is not None:
        return [verdict.sentence]
    if case.outcome is Outcome.REFUSED:
        return []  # the job ended early, and its steps until then are the same
    if verdict.missing or (verdict.repeated and case.outcome is not Outcome.STORAGE):
        return [verdict.sentence]
    return []


def _seconds(incidents: Sequence[IncidentSummary]) -> float | None:
    if not incidents or incidents[-1].end_ns is None:
        return None
    return (incidents[-1].end_ns - incidents[0].start_ns) / 1e9


class _Runner:
    """Runs the cases, each kind also once without faults."""

    def __init__(self, config: ChaosConfig) -> None:
        self._config = config
        self._nursery = _Nursery(config.trainer)
        self._calm: dict[object, Steps] = {}

    def run(self, case: Case) -> _Result:
        """Run a case.

        Raises:
            RuntimeError: the run without faults failed.
        """
        reference, directory = self._reference(case), self.directory(case)
        shutil.rmtree(directory, ignore_errors=True)
        began_s = time.monotonic()
        ended = self._nursery.run(_configs(self._config.trainer, case, directory, faulty=True), LIMIT_S)
        took_s = time.monotonic() - began_s
        return replace(_judge(case, ended[0], directory, reference), took_s=took_s)

    def directory(self, case: Case) -> Path:
        """Return the run directory of a case."""
        return self._config.run_dir / f"case-{case.number}"

    def _reference(self, case: Case) -> Steps:
        trainer = self._config.trainer
        key = case.layout.world_size, trainer.program(_task(case, None))
        if key not in self._calm:
            directory = self._config.run_dir / "calm" / str(len(self._calm))
            (ended,) = self._nursery.run(_configs(trainer, case, directory, faulty=False), LIMIT_S)
            if ended.code != 0:
                raise RuntimeError(f"the undisturbed run of {case.layout.text} failed; its logs: {directory}")
            self._calm[key] = read_steps(directory)
        return self._calm[key]


def _configs(trainer: Trainer, case: Case, directory: Path, *, faulty: bool) -> list[LaunchConfig]:
    nodes, spares = (case.nodes, case.spares) if faulty else (1, 0)
    meeting: Mapping[str, Any] = {}
    if nodes + spares > 1:
        meeting = {"rdzv_endpoint": f"127.0.0.1:{_port()}", "token": secrets.token_hex(32)}
    hangs = any(parse(text).kind in HANGING for text in case.faults)
    module, arguments = trainer.program(_task(case, directory / "nemo" if faulty else None))
    return [
        LaunchConfig(
            nproc_per_node=case.layout.world_size // nodes,
            script=module,
            script_args=arguments,
            module=True,
            run_dir=directory,
            preload=(),
            cpu=True,
            heartbeat_timeout_s=_HANG_HEARTBEAT_S if hangs else _HEARTBEAT_S,
            regroup_timeout_s=_REGROUP_S,
            node_timeout_s=_NODE_TIMEOUT_S,
            faults=case.faults if faulty else (),
            record_steps=True,
            stream_logs=False,
            fork_here=True,
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


def _write(results: Sequence[_Result], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([_entry(result) for result in results], indent=1) + "\n")


def _entry(result: _Result) -> dict[str, Any]:
    layout = result.case.layout
    return {
        **asdict(result.case),
        "layout": {"nproc": layout.world_size, "sizes": layout.sizes, "holders": layout.instances},
        "outcome": result.case.outcome.value,
        "problem": result.problem,
        "seconds": result.seconds,
        "took_s": round(result.took_s, 2),
    }


# A process that has imported the frameworks once and forks the agents of whole jobs, one job after the other.


@dataclass(frozen=True)
class _Ended:
    """How an agent ended.

    Attributes:
        code: exit code, or the negative number of the signal that killed the agent; None if it was still running.
    """

    code: int | None
    said: tuple[str, ...]


class _Nursery:
    """Turns this process into one that forks agents, with a trainer's modules imported and with one thread.

    Raises:
        ImportError: one of the trainer's modules is not installed.
    """

    def __init__(self, trainer: Trainer) -> None:
        os.environ[CPU_ENV] = YES
        os.environ[OMP_NUM_THREADS_ENV] = "1"  # otherwise sums would depend on the number of ranks of a node
        if trainer.name == "nemo":
            from checkpointless.recipes.runner import prepare_process

            prepare_process()
        for name in ("torch.distributed", *trainer.preload()):
            importlib.import_module(name)
        import torch

        torch.set_num_threads(1)
        gc.collect()
        gc.freeze()

    def run(self, configs: Sequence[LaunchConfig], limit_s: float) -> list[_Ended]:
        """Run the agents of one job until all have ended."""
        agents = [AgentProcess(config) for config in configs]
        try:
            _wait(agents, time.monotonic() + limit_s)
        except KeyboardInterrupt:
            for agent in agents:
                agent.send(signal.SIGINT)
            _wait(agents, time.monotonic() + _LEAVE_S)
            raise
        finally:
            codes = [agent.poll() for agent in agents]
            for agent in agents:
                agent.kill()
        return [_Ended(code, agent.lines()) for code, agent in zip(codes, agents, strict=True)]


def _wait(agents: Sequence[AgentProcess], until_s: float) -> None:
    while any([agent.poll() is None for agent in agents]) and time.monotonic() < until_s:
        time.sleep(_REAP_EVERY_S)
