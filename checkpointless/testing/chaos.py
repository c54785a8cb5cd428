"""Chaos: many small jobs with drawn faults, each compared with what it must do and an undisturbed run."""

from __future__ import annotations

import enum
import os
import random
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

from checkpointless.faults.spec import (
    DEADLY,
    HANGING,
    IN_PROCESS,
    NODES,
    SETUP_PHASES,
    FaultKind,
    FaultPhase,
    parse,
)
from checkpointless.launcher.agent.launch_config import LaunchConfig
from checkpointless.observability.report.incidents import IncidentSummary, Outcome
from checkpointless.observability.report.verify import Steps
from checkpointless.observability.telemetry.event_names import Rung
from checkpointless.observability.telemetry.steps import read_steps
from checkpointless.system.environment import OMP_NUM_THREADS_ENV
from checkpointless.system.layout import Layout
from checkpointless.testing.demo.trainers import TRAINERS, Task, Trainer
from checkpointless.testing.jobs import Ended, Job, import_once, run_jobs

# --- The cases ----------------------------------------------------------------------------------------------------

#: Weight of each group in the draws. A hang is found only at the heartbeat limit, and nodes take time to start.
_GROUPS = {IN_PROCESS: 5, DEADLY: 5, HANGING: 2, NODES: 2, (FaultKind.SLOW,): 1, (FaultKind.BITFLIP,): 1}
#: Phases of a step in which a fault makes the step run again, and can be followed by a fault in the set-up.
_BEFORE_UPDATE = (FaultPhase.DATA, FaultPhase.FORWARD, FaultPhase.BACKWARD, FaultPhase.SYNC)
DROPOUT = 0.1
_PARTITION_S, _LINGER_S = 5, 4


class _Outcome(enum.Enum):
    """The required outcome of a case. Up to its end, losses and parameters are those of an undisturbed run."""

    NOTHING = "no incident"
    IN_PROCESS = "recovered in process"
    PROCESS = "recovered by a new process"
    NODE = "recovered by other processes of a node"
    STORAGE = "fell back to storage"
    REFUSED = "refused with the reason"


_OF_RUNG = {
    Rung.IN_PROCESS: _Outcome.IN_PROCESS,
    Rung.OWN_STATE: _Outcome.PROCESS,
    Rung.PROCESS: _Outcome.PROCESS,
    Rung.NODE: _Outcome.NODE,
    Rung.JOB: _Outcome.STORAGE,
}


def _outcome_of(code: int, incidents: Sequence[IncidentSummary]) -> _Outcome | None:
    """Return the outcome of a job, or None if it is not an outcome that a job may have."""
    if code == 0:
        if not incidents:
            return _Outcome.NOTHING
        if incidents[-1].outcome is not Outcome.RESUMED or any(each.inexact for each in incidents):
            return None
        return _OF_RUNG[max(incident.rung for incident in incidents)]
    return _Outcome.REFUSED if code == 1 and incidents else None


@dataclass(frozen=True)
class _Scope:
    """What may be drawn for one trainer."""

    name: str  # after which the seed draws other cases
    # layouts, each of which holds every shard at least twice, with their weights
    layouts: Sequence[tuple[Layout, int]]
    phases: frozenset[FaultPhase] = frozenset(FaultPhase)
    storage: bool = False  # whether the trainer can fall back to checkpoints of its own

    def known(self, phases: Sequence[FaultPhase]) -> Sequence[FaultPhase]:
        return [phase for phase in phases if phase in self.phases]


#: The layouts of NeMo's trainer, from which cases are drawn by default.
_LAYOUTS = (
    Layout.on_one_node(2),
    Layout.on_one_node(4),
    Layout.on_one_node(4, tensor=2),
    Layout.on_one_node(4, pipeline=2),
    Layout.on_one_node(4, expert=2),
    Layout.on_one_node(6, instances=3),
    Layout.on_one_node(8, tensor=2, pipeline=2),
)
_OFTEN = (2, 4, 4, 4, 3, 2, 1)  # weights in the draws: larger layouts take longer
_SILENT = frozenset({FaultPhase.SYNC})  # a phase that only Megatron's hooks in NeMo show
_ANNOUNCED = frozenset(FaultPhase) - _SILENT
_REPLICATED = [
    (Layout(ranks, ranks, instances=ranks, sharded=False), often) for ranks, often in ((2, 2), (4, 4), (6, 1))
]
_SHARDED = [
    (Layout.on_one_node(4), 4),
    (Layout.on_one_node(6, instances=3), 2),
    (Layout.on_one_node(8, tensor=2), 1),
]
_NEMO = _Scope("", list(zip(_LAYOUTS, _OFTEN, strict=True)), storage=True)
_WITHOUT_EXPERTS = [each for each in _NEMO.layouts if each[0].expert == 1]
#: By the trainer's name.
_SCOPES = {
    "nemo": _NEMO,
    "ddp": _Scope("/ddp", _REPLICATED, _ANNOUNCED),
    "hsdp": _Scope("/hsdp", _SHARDED, _ANNOUNCED),
    "megatron": _Scope("/megatron", _WITHOUT_EXPERTS, _ANNOUNCED),
    "lightning-ddp": _Scope("/lightning-ddp", _REPLICATED, _ANNOUNCED),
    "lightning-hsdp": _Scope("/lightning-hsdp", _SHARDED, _ANNOUNCED),
}


@dataclass(frozen=True)
class _Case:
    """One run with faults, and the outcome that it must have; NeMo saves each ``checkpoint_every`` steps."""

    seed: int
    number: int
    layout: Layout
    steps: int
    faults: tuple[str, ...]
    outcome: _Outcome
    reason: str = ""
    nodes: int = 1
    spares: int = 0
    workers: int = 0
    checksum: bool = False
    checkpoint_every: int = 0
    dropout: float = DROPOUT


def _draw(
    seed: int, number: int, *, steps: int = 6, overlap: bool = False, most_ranks: int = 8, scope: _Scope = _NEMO
) -> _Case:
    """Return the case of a number, independent of others; with ``overlap`` half of them have a second fault."""
    if steps < 6:
        raise ValueError(f"chaos needs at least 6 steps, not {steps}")
    fitting = [(layout, often) for layout, often in scope.layouts if layout.world_size <= most_ranks]
    if not fitting:
        fewest = min(layout.world_size for layout, _ in scope.layouts)
        raise ValueError(f"chaos needs at least {fewest} ranks, not {most_ranks}")
    dice = random.Random(f"checkpointless/{seed}/{number}/{overlap}{scope.name}")
    (layout,) = dice.choices([layout for layout, _ in fitting], [often for _, often in fitting])
    drawn = _Drawn(dice, _Case(seed, number, layout, steps, (), _Outcome.NOTHING), scope)
    if overlap and dice.random() < 0.5:
        return dice.choice((drawn.during_recovery, drawn.at_once))()
    (group,) = dice.choices(list(_GROUPS), list(_GROUPS.values()))
    return drawn.alone(dice.choice(group))


class _Drawn:
    """The random choices of one case."""

    def __init__(self, dice: random.Random, blank: _Case, scope: _Scope) -> None:
        self._dice, self._blank, self._scope, self._layout = dice, blank, scope, blank.layout
        self._before_update = scope.known(_BEFORE_UPDATE)
        self._step = dice.randrange(3, blank.steps)
        self._rank = dice.randrange(blank.layout.world_size)

    def alone(self, kind: FaultKind) -> _Case:
        """Return a case with one fault, in any phase of a step."""
        dice, rank, step = self._dice, self._rank, self._step
        if kind is FaultKind.BITFLIP:
            return self._bitflip()
        if kind in NODES:
            return self._node(kind)
        in_steps = [phase for phase in FaultPhase if phase in kind.phases - SETUP_PHASES]
        phase = dice.choice(self._scope.known(in_steps))
        more = ",seconds=1" if kind is FaultKind.SLOW else ""
        if kind is FaultKind.DATALOADER:
            more = f",how={dice.choice(('raise', 'kill'))}"
        outcome = _Outcome.NOTHING if kind is FaultKind.SLOW else _after(kind)
        workers = 2 if kind is FaultKind.DATALOADER else 0
        return self._case(_spec(kind, phase, rank, step) + more, outcome=outcome, workers=workers)

    def during_recovery(self) -> _Case:
        """Return a case with a second fault during the recovery from the first."""
        dice, step = self._dice, self._step
        first = dice.choice((FaultKind.EXCEPTION, *DEADLY[:-1]))
        phase = dice.choice(self._scope.known((FaultPhase.INIT, FaultPhase.RECOVERY, FaultPhase.TRANSFER)))
        second = dice.choice((FaultKind.EXCEPTION, FaultKind.OOM, *DEADLY))
        rank, other = self._rank, dice.randrange(self._layout.world_size)
        if phase is FaultPhase.TRANSFER:  # this phase comes only where something is sent
            first = dice.choice(DEADLY[:-1])
            other = dice.choice(sorted(self._layout.replicas(rank) - {rank}))
        faults = (_spec(first, dice.choice(self._before_update), rank, step), _spec(second, phase, other, step - 1))
        lost = {where for kind, where in ((first, rank), (second, other)) if kind in DEADLY}
        if not lost:
            return self._case(*faults, outcome=_Outcome.IN_PROCESS)
        return self._unless_all_are_lost(lost, _Outcome.PROCESS, *faults)

    def at_once(self) -> _Case:
        """Return a case in which two ranks fail in the same phase of a step, but never all holders of a shard."""
        dice, rank = self._dice, self._rank
        others = set(range(self._layout.world_size)) - self._layout.replicas(rank)
        kinds = (FaultKind.EXCEPTION, FaultKind.OOM, *DEADLY[:-1])
        first, second = dice.choice(kinds), dice.choice(kinds)
        if not others:  # every rank holds the one shard, which the second fault must not lose
            others, second = set(range(self._layout.world_size)) - {rank}, FaultKind.EXCEPTION
        phase, other = dice.choice(self._before_update), dice.choice(sorted(others))
        faults = (_spec(first, phase, rank, self._step), _spec(second, phase, other, self._step))
        higher = _Outcome.PROCESS if {first, second} & set(DEADLY) else _Outcome.IN_PROCESS
        return self._case(*faults, outcome=higher)

    def _node(self, kind: FaultKind) -> _Case:
        """Return a case that loses the second of two nodes; a spare waits only if it cannot come back by itself."""
        if self._layout.world_size % 2 or self._layout.world_size > 6:
            self._layout = Layout.on_one_node(4)
        half, step = self._layout.world_size // 2, self._step
        rank = half + self._rank % half
        faults = [_spec(kind, self._dice.choice(self._before_update), rank, step)]
        if kind is FaultKind.PARTITION:
            faults[0] += f",seconds={_PARTITION_S}"
            # so that the job does not end before the partition is noticed
            faults.append(_spec(FaultKind.SLOW, FaultPhase.BETWEEN, 0, step) + f",seconds={_LINGER_S}")
        lost = set(range(half, 2 * half)) if kind is FaultKind.NODE else set()  # after the others, it is taken back
        spares = int(kind is FaultKind.NODE)
        return self._unless_all_are_lost(lost, _Outcome.NODE, *faults, nodes=2, spares=spares)

    def _bitflip(self) -> _Case:
        """Return a case that flips a bit of a replica, found in the next recovery, or of a bucket in transfer."""
        rank, step = self._rank, self._step
        partners = sorted(self._layout.replicas(rank) - {rank})
        if self._dice.random() < 0.5:
            faults = (
                _spec(FaultKind.SIGKILL, FaultPhase.FORWARD, rank, step),
                _spec(FaultKind.BITFLIP, FaultPhase.TRANSFER, partners[0], step - 1),
            )
            return self._case(*faults, outcome=_Outcome.PROCESS)
        faults = (
            _spec(FaultKind.BITFLIP, FaultPhase.BETWEEN, rank, step - 1),
            _spec(FaultKind.EXCEPTION, FaultPhase.BEFORE_OPTIMIZER, self._dice.choice(partners), step),
        )
        if len(partners) > 1:
            return self._case(*faults, outcome=_Outcome.IN_PROCESS, checksum=True)
        reason = f"the replicas of the shard of ranks {_ranks([rank, *partners])} differ"
        return self._case(*faults, outcome=_Outcome.REFUSED, reason=reason, checksum=True)

    def _unless_all_are_lost(
        self, lost: set[int], otherwise: _Outcome, *faults: str, nodes: int = 1, spares: int = 0
    ) -> _Case:
        gone = next((group for group in self._groups() if group <= lost), None)
        if gone is None:
            return self._case(*faults, outcome=otherwise, nodes=nodes, spares=spares)
        if self._scope.storage and nodes == 1 and self._dice.random() < 0.5:
            # NeMo's checkpoints do not hold the random streams
            return self._case(*faults, outcome=_Outcome.STORAGE, checkpoint_every=2, dropout=0.0)
        reason = f"no living rank holds the shard of {'rank' if len(gone) == 1 else 'ranks'} {_ranks(gone)}"
        return self._case(*faults, outcome=_Outcome.REFUSED, reason=reason, nodes=nodes, spares=spares)

    def _groups(self) -> list[frozenset[int]]:
        return sorted({self._layout.replicas(rank) for rank in range(self._layout.world_size)}, key=min)

    def _case(self, *faults: str, outcome: _Outcome, **more: Any) -> _Case:  # Any: further fields of the case
        return replace(self._blank, layout=self._layout, faults=faults, outcome=outcome, **more)


def _after(kind: FaultKind) -> _Outcome:
    return _Outcome.IN_PROCESS if kind in IN_PROCESS else _Outcome.PROCESS


def _spec(kind: FaultKind, phase: FaultPhase, rank: int, step: int) -> str:
    return f"{kind.value}@{phase.value}:rank={rank},step={step}"


def _ranks(ranks: Sequence[int] | frozenset[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


# --- Running them -------------------------------------------------------------------------------------------------

LIMIT_S = 150.0
_HEARTBEAT_S, _HANG_HEARTBEAT_S = 20.0, 6.0
_NODE_TIMEOUT_S, _REGROUP_S = 3.0, 60.0
_SMALL_BUCKETS = 262144  # bytes; so that a transfer has a middle


@dataclass(frozen=True)
class ChaosConfig:
    """Configuration of the cases to be run."""

    cases: int
    seed: int
    overlap: bool  # whether half of the cases have a second fault
    only: int | None  # number of the one case to be run; None: all cases
    steps: int
    most_ranks: int
    run_dir: Path
    trainer: Trainer = TRAINERS["nemo"]

    def drawn(self) -> list[_Case]:
        """Return the cases; ``ValueError`` if they cannot be drawn."""
        numbers = range(self.cases) if self.only is None else (self.only,)
        return [
            _draw(
                self.seed,
                number,
                steps=self.steps,
                overlap=self.overlap,
                most_ranks=self.most_ranks,
                scope=_SCOPES[self.trainer.name],
            )
            for number in numbers
        ]

    def repeat(self, case: _Case) -> str:
        """Return the command that runs ``case`` again."""
        overlap = " --overlap" if self.overlap else ""
        overlap += f" --trainer {self.trainer.name}" if self.trainer is not TRAINERS["nemo"] else ""
        return (
            f"checkpointless demo --chaos {self.cases} --seed {self.seed}{overlap} --steps {self.steps} "
            f"--nproc {self.most_ranks} --chaos-case {case.number}"
        )

    def run(self, console: Console) -> int:
        """Run all cases and show their results; return 0 if every case ended as it must, else 1."""
        cases = self.drawn()
        shown = "one case" if self.only is not None else f"{len(cases)} cases"
        console.print(
            f"chaos: {shown} of seed {self.seed}, trainer {self.trainer.name}; faults will be injected; "
            "importing the frameworks once ..."
        )
        runner = _Runner(self)
        results = []
        for index, case in enumerate(cases, start=1):
            result = runner.run(case)
            results.append(result)
            _say(console, index, len(cases), result)
            if result.problem:
                console.print(f"    repeat it: {self.repeat(case)}")
            elif self.only is None:
                shutil.rmtree(runner.directory(case))
        console.print(_table(results))
        wrong = [result for result in results if result.problem]
        console.print(
            f"{len(results) - len(wrong)} of {len(results)} cases ended as they must"
            + (f"; logs of the others: {self.run_dir}" if wrong else "")
        )
        return 1 if wrong else 0


@dataclass(frozen=True)
class _Result:
    """Result of a case; ``seconds`` are those of its incidents."""

    case: _Case
    problem: str = ""
    seconds: float | None = None


def _judge(case: _Case, ended: Ended, calm: Steps) -> _Result:
    """Compare a job with its expected outcome and with a run without faults."""
    outcome = _outcome_of(ended.code, ended.incidents) if ended.in_time and ended.code is not None else None
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
    if not verdict.equal and (case.outcome is not _Outcome.REFUSED or verdict.difference is not None):
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

    def run(self, case: _Case) -> _Result:
        reference, directory = self._reference(case), self.directory(case)
        shutil.rmtree(directory, ignore_errors=True)
        (ended,) = run_jobs([Job(directory.name, self._configs(case, directory, faulty=True), LIMIT_S)])
        return _judge(case, ended, reference)

    def directory(self, case: _Case) -> Path:
        return self._config.run_dir / f"case-{case.number}"

    def _reference(self, case: _Case) -> Steps:
        key = case.layout.world_size, self._config.trainer.program(_task(case, None))
        if key not in self._calm:
            directory = self._config.run_dir / "calm" / str(len(self._calm))
            (ended,) = run_jobs([Job("calm", self._configs(case, directory, faulty=False), LIMIT_S)])
            if not ended.is_good:
                raise RuntimeError(f"the undisturbed run of {case.layout.text} failed; its logs: {directory}")
            self._calm[key] = read_steps(directory)
        return self._calm[key]

    def _configs(self, case: _Case, directory: Path, *, faulty: bool) -> list[LaunchConfig]:
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


def _task(case: _Case, checkpoints: Path | None) -> Task:
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
