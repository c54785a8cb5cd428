"""Chaos: faults that a seed draws from all that can be caused, each with the outcome that it must have.

Everything here is a pure function of the seed, so a case can be repeated by its number alone.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from checkpointless.faults.spec import SETUP_PHASES, FaultKind, FaultPhase
from checkpointless.observability.report.incidents import IncidentSummary
from checkpointless.observability.report.incidents import Outcome as Ending
from checkpointless.observability.telemetry.event_names import Rung
from checkpointless.system.layout import Layout

#: Groups of kinds: those after which the process goes on, and those after which another process replaces it.
IN_PROCESS = (FaultKind.EXCEPTION, FaultKind.OOM, FaultKind.DATALOADER)
DEADLY = (FaultKind.SIGKILL, FaultKind.EXIT, FaultKind.SEGFAULT, FaultKind.ABORT, FaultKind.SIGTERM)
HANGING = (FaultKind.HANG, FaultKind.GIL, FaultKind.SIGSTOP)
NODES = (FaultKind.NODE, FaultKind.PARTITION, FaultKind.STORE)

#: Weight of each group in the draws. A hang is found only at the heartbeat limit, and nodes take time to start.
_GROUPS = {IN_PROCESS: 5, DEADLY: 5, HANGING: 2, NODES: 2, (FaultKind.SLOW,): 1, (FaultKind.BITFLIP,): 1}
#: Phases of a step in which a fault makes the step run again, and can be followed by a fault in the set-up.
_BEFORE_UPDATE = (FaultPhase.DATA, FaultPhase.FORWARD, FaultPhase.BACKWARD, FaultPhase.SYNC)
DROPOUT = 0.1
_PARTITION_S, _LINGER_S = 5, 4


class Outcome(enum.Enum):
    """The required outcome of a case. Up to its end, losses and parameters are those of an undisturbed run."""

    NOTHING = "no incident"
    IN_PROCESS = "recovered in process"
    PROCESS = "recovered by a new process"
    NODE = "recovered by other processes of a node"
    STORAGE = "fell back to storage"
    REFUSED = "refused with the reason"


_OF_RUNG = {
    Rung.IN_PROCESS: Outcome.IN_PROCESS,
    Rung.OWN_STATE: Outcome.PROCESS,
    Rung.PROCESS: Outcome.PROCESS,
    Rung.NODE: Outcome.NODE,
    Rung.JOB: Outcome.STORAGE,
}


def outcome_of(code: int, incidents: Sequence[IncidentSummary]) -> Outcome | None:
    """Return the outcome of a job, or None if it is not an outcome that a job may have."""
    if code == 0:
        if not incidents:
            return Outcome.NOTHING
        if incidents[-1].outcome is not Ending.RESUMED or any(each.inexact for each in incidents):
            return None
        return _OF_RUNG[max(incident.rung for incident in incidents)]
    return Outcome.REFUSED if code == 1 and incidents else None


@dataclass(frozen=True)
class Scope:
    """What may be drawn for one trainer.

    Attributes:
        name: what its draws are known by; the seed draws other cases for each name.
        layouts: layouts, each of which holds every shard at least twice, with their weights.
        storage: whether the trainer can fall back to checkpoints of its own.
    """

    name: str
    layouts: Sequence[tuple[Layout, int]]
    phases: frozenset[FaultPhase] = frozenset(FaultPhase)
    storage: bool = False

    def known(self, phases: Sequence[FaultPhase]) -> Sequence[FaultPhase]:
        """Return those of ``phases`` that the trainer announces."""
        return [phase for phase in phases if phase in self.phases]


#: The layouts of NeMo's trainer, from which cases are drawn by default.
LAYOUTS = (
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
NEMO = Scope("nemo", list(zip(LAYOUTS, _OFTEN, strict=True)), storage=True)
DATA_PARALLEL = Scope("ddp", _REPLICATED, _ANNOUNCED)
SHARDED = Scope("hsdp", _SHARDED, _ANNOUNCED)
MEGATRON = Scope("megatron", [each for each in NEMO.layouts if each[0].expert == 1], _ANNOUNCED)
LIGHTNING = Scope("lightning-ddp", _REPLICATED, _ANNOUNCED)
LIGHTNING_SHARDED = Scope("lightning-hsdp", _SHARDED, _ANNOUNCED)


@dataclass(frozen=True)
class Case:
    """One run with faults, and the outcome that it must have.

    ``checkpoint_every`` are the optimizer steps between two of NeMo's own checkpoints (0: none).
    """

    seed: int
    number: int
    layout: Layout
    steps: int
    faults: tuple[str, ...]
    outcome: Outcome
    reason: str = ""
    nodes: int = 1
    spares: int = 0
    workers: int = 0
    checksum: bool = False
    checkpoint_every: int = 0
    dropout: float = DROPOUT


def draw(
    seed: int, number: int, *, steps: int = 6, overlap: bool = False, most_ranks: int = 8, scope: Scope = NEMO
) -> Case:
    """Return the case with a given number, from 0, which does not depend on the other cases.

    Args:
        steps: number of optimizer steps of the job; at least 6.
        overlap: let half of the cases have a second fault, either during the recovery from the first or at the same
            time on a rank of another replica group.

    Raises:
        ValueError: no layout has so few ranks, or there are too few steps.
    """
    if steps < 6:
        raise ValueError(f"chaos needs at least 6 steps, not {steps}")
    fitting = [(layout, often) for layout, often in scope.layouts if layout.world_size <= most_ranks]
    if not fitting:
        fewest = min(layout.world_size for layout, _ in scope.layouts)
        raise ValueError(f"chaos needs at least {fewest} ranks, not {most_ranks}")
    trainer = "" if scope is NEMO else f"/{scope.name}"
    dice = random.Random(f"checkpointless/{seed}/{number}/{overlap}{trainer}")
    (layout,) = dice.choices([layout for layout, _ in fitting], [often for _, often in fitting])
    drawn = _Drawn(dice, seed, number, layout, steps, scope)
    if overlap and dice.random() < 0.5:
        return dice.choice((drawn.during_recovery, drawn.at_once))()
    (group,) = dice.choices(list(_GROUPS), list(_GROUPS.values()))
    return drawn.alone(dice.choice(group))


class _Drawn:
    """The random choices of one case."""

    def __init__(
        self, dice: random.Random, seed: int, number: int, layout: Layout, steps: int, scope: Scope
    ) -> None:
        self._dice = dice
        self._scope = scope
        self._before_update = scope.known(_BEFORE_UPDATE)
        self._seed = seed
        self._number = number
        self._layout = layout
        self._steps = steps
        self._step = dice.randrange(3, steps)
        self._rank = dice.randrange(layout.world_size)

    def alone(self, kind: FaultKind) -> Case:
        """Return a case with one fault, in any phase of a step."""
        dice, rank, step = self._dice, self._rank, self._step
        if kind is FaultKind.BITFLIP:
            return self._bitflip()
        if kind in NODES:
            return self._node(kind)
        phase = dice.choice(self._scope.known(_sorted(kind.phases - SETUP_PHASES)))
        more = ",seconds=1" if kind is FaultKind.SLOW else ""
        if kind is FaultKind.DATALOADER:
            more = f",how={dice.choice(('raise', 'kill'))}"
        outcome = Outcome.NOTHING if kind is FaultKind.SLOW else _outcome(kind)
        workers = 2 if kind is FaultKind.DATALOADER else 0
        return self._case(_spec(kind, phase, rank, step) + more, outcome=outcome, workers=workers)

    def during_recovery(self) -> Case:
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
            return self._case(*faults, outcome=Outcome.IN_PROCESS)
        return self._unless_all_are_lost(lost, Outcome.PROCESS, *faults)

    def at_once(self) -> Case:
        """Return a case in which two ranks fail in the same phase of a step, but never all holders of a shard."""
        dice, rank = self._dice, self._rank
        others = set(range(self._layout.world_size)) - self._layout.replicas(rank)
        kinds = (FaultKind.EXCEPTION, FaultKind.OOM, *DEADLY[:-1])
        first, second = dice.choice(kinds), dice.choice(kinds)
        if not others:  # every rank holds the one shard, which the second fault must not lose
            others, second = set(range(self._layout.world_size)) - {rank}, FaultKind.EXCEPTION
        phase, other = dice.choice(self._before_update), dice.choice(sorted(others))
        faults = (_spec(first, phase, rank, self._step), _spec(second, phase, other, self._step))
        higher = Outcome.PROCESS if {first, second} & set(DEADLY) else Outcome.IN_PROCESS
        return self._case(*faults, outcome=higher)

    def _node(self, kind: FaultKind) -> Case:
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
        return self._unless_all_are_lost(lost, Outcome.NODE, *faults, nodes=2, spares=spares)

    def _bitflip(self) -> Case:
        """Return a case that flips a bit of a replica, found in the next recovery, or of a bucket in transfer."""
        rank, step = self._rank, self._step
        partners = sorted(self._layout.replicas(rank) - {rank})
        if self._dice.random() < 0.5:
            faults = (
                _spec(FaultKind.SIGKILL, FaultPhase.FORWARD, rank, step),
                _spec(FaultKind.BITFLIP, FaultPhase.TRANSFER, partners[0], step - 1),
            )
            return self._case(*faults, outcome=Outcome.PROCESS)
        faults = (
            _spec(FaultKind.BITFLIP, FaultPhase.BETWEEN, rank, step - 1),
            _spec(FaultKind.EXCEPTION, FaultPhase.BEFORE_OPTIMIZER, self._dice.choice(partners), step),
        )
        if len(partners) > 1:
            return self._case(*faults, outcome=Outcome.IN_PROCESS, checksum=True)
        reason = f"the replicas of the shard of ranks {_ranks([rank, *partners])} differ"
        return self._case(*faults, outcome=Outcome.REFUSED, reason=reason, checksum=True)

    def _unless_all_are_lost(
        self, lost: set[int], otherwise: Outcome, *faults: str, nodes: int = 1, spares: int = 0
    ) -> Case:
        gone = next((group for group in self._groups() if group <= lost), None)
        if gone is None:
            return self._case(*faults, outcome=otherwise, nodes=nodes, spares=spares)
        if self._scope.storage and nodes == 1 and self._dice.random() < 0.5:
            # NeMo's checkpoints do not hold the random streams
            return self._case(*faults, outcome=Outcome.STORAGE, checkpoint_every=2, dropout=0.0)
        reason = f"no living rank holds the shard of {'rank' if len(gone) == 1 else 'ranks'} {_ranks(gone)}"
        return self._case(*faults, outcome=Outcome.REFUSED, reason=reason, nodes=nodes, spares=spares)

    def _groups(self) -> list[frozenset[int]]:
        return sorted({self._layout.replicas(rank) for rank in range(self._layout.world_size)}, key=min)

    def _case(self, *faults: str, outcome: Outcome, **more: Any) -> Case:  # Any: further fields of the case
        return Case(self._seed, self._number, self._layout, self._steps, faults, outcome, **more)


def _outcome(kind: FaultKind) -> Outcome:
    return Outcome.IN_PROCESS if kind in IN_PROCESS else Outcome.PROCESS


def _spec(kind: FaultKind, phase: FaultPhase, rank: int, step: int) -> str:
    return f"{kind.value}@{phase.value}:rank={rank},step={step}"


def _sorted(phases: frozenset[FaultPhase]) -> Sequence[FaultPhase]:
    return [phase for phase in FaultPhase if phase in phases]


def _ranks(ranks: Sequence[int] | frozenset[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
