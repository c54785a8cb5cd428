"""Chaos: faults drawn by a seed from all that can be caused, each with what must come of it.

Everything here is a pure function of the seed, so a case is repeated by its number alone.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from checkpointless.faults.spec import SETUP_PHASES, SUPPORT, FaultKind, FaultPhase
from checkpointless.telemetry.incidents import IncidentSummary, Rung
from checkpointless.telemetry.incidents import Outcome as Ending

#: Kinds after which the process goes on, and those after which it is another one.
IN_PROCESS = (FaultKind.EXCEPTION, FaultKind.OOM, FaultKind.DATALOADER)
DEADLY = (FaultKind.SIGKILL, FaultKind.EXIT, FaultKind.SEGFAULT, FaultKind.ABORT, FaultKind.SIGTERM)
HANGING = (FaultKind.HANG, FaultKind.GIL, FaultKind.SIGSTOP)
NODES = (FaultKind.NODE, FaultKind.PARTITION, FaultKind.STORE)

#: How often a case is drawn of each group: who hangs is found only at the limit, and nodes take time to start.
_GROUPS = {IN_PROCESS: 5, DEADLY: 5, HANGING: 2, NODES: 2, (FaultKind.SLOW,): 1, (FaultKind.BITFLIP,): 1}
#: Phases of a step whose interruption makes the step again, and can be followed by one in the set-up.
_BEFORE_UPDATE = (FaultPhase.DATA, FaultPhase.FORWARD, FaultPhase.BACKWARD, FaultPhase.SYNC)
DROPOUT = 0.1
_PARTITION_S, _LINGER_S = 5, 4


class Outcome(enum.Enum):
    """What must come of a case. Losses and parameters are those of an undisturbed run, up to where it ends."""

    NOTHING = "no incident"
    IN_PROCESS = "recovered in process"
    PROCESS = "recovered by a new process"
    NODE = "recovered by other processes of a node"
    STORAGE = "fell back to storage"
    REFUSED = "refused with the reason"


_OF_RUNG = {
    Rung.IN_PROCESS: Outcome.IN_PROCESS,
    Rung.PROCESS: Outcome.PROCESS,
    Rung.NODE: Outcome.NODE,
    Rung.JOB: Outcome.STORAGE,
}


def outcome_of(code: int, incidents: Sequence[IncidentSummary]) -> Outcome | None:
    """What came of a job; None if that is nothing that may come of one.

    Args:
        code: its exit code.
        incidents: all that it had, in order.
    """
    if code == 0:
        if not incidents:
            return Outcome.NOTHING
        if incidents[-1].outcome is not Ending.RESUMED:
            return None
        return _OF_RUNG[max(incident.rung for incident in incidents)]
    return Outcome.REFUSED if code == 1 and incidents else None


@dataclass(frozen=True)
class Layout:
    """How ranks share a model.

    Attributes:
        nproc: how many ranks.
        sizes: parallel sizes by ``tp``, ``pp``, ``ep``; one that is not there is 1.
        holders: ranks that hold each shard of the optimizer.
    """

    nproc: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    holders: int = 2

    @property
    def text(self) -> str:
        """For people."""
        sizes = ",".join(f"{key}={size}" for key, size in self.sizes.items()) or "data parallel"
        return f"{self.nproc} ranks, {sizes}" + (f", {self.holders} holders" if self.holders != 2 else "")

    def replicas(self, rank: int) -> frozenset[int]:
        """The ranks that hold the same shard of model and optimizer as ``rank``, itself among them.

        Megatron-core's order of ranks is tp-cp-ep-dp-pp, the first the fastest; its distributed optimizer divides
        the data-parallel ranks into ``holders`` instances of consecutive ones
        (``parallel_state.initialize_model_parallel``).
        """
        tensor, pipeline = self.sizes.get("tp", 1), self.sizes.get("pp", 1)
        data = self.nproc // (tensor * pipeline)
        instance = data // self.holders
        stage, inside = divmod(rank, tensor * data)
        replica, shard = divmod(inside, tensor)
        first = replica % instance
        return frozenset(
            (stage * data + first + number * instance) * tensor + shard for number in range(self.holders)
        )


#: Where cases are drawn from; each holds every shard at least twice.
LAYOUTS = (
    Layout(2),
    Layout(4),
    Layout(4, {"tp": 2}),
    Layout(4, {"pp": 2}),
    Layout(4, {"ep": 2}),
    Layout(6, holders=3),
    Layout(8, {"tp": 2, "pp": 2}),
)
_OFTEN = (2, 4, 4, 4, 3, 2, 1)  # larger ones take longer


@dataclass(frozen=True)
class Case:
    """One run with faults.

    Attributes:
        seed: that it was drawn from.
        number: which of that seed's.
        layout: of the job.
        steps: optimizer steps of the job.
        faults: specs.
        outcome: what must come of it.
        reason: what a refusal has to say.
        nodes: how many nodes the ranks are on.
        spares: how many more wait.
        workers: of each data loader.
        checksum: whether replicas are compared.
        checkpoint_every: steps between two of NeMo's own checkpoints (0: none).
        dropout: probability in [0, 1).
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


def draw(seed: int, number: int, *, steps: int = 6, overlap: bool = False, most_ranks: int = 8) -> Case:
    """The case of that number.

    Args:
        seed: of all draws.
        number: from 0; the others do not matter to it.
        steps: optimizer steps of the job; at least 6.
        overlap: let half of the cases have a second fault, during the recovery from the first or on a rank of
            another replica group at once.
        most_ranks: of a layout.

    Raises:
        ValueError: no layout has so few ranks, or the steps are too few.
    """
    if steps < 6:
        raise ValueError(f"chaos needs at least 6 steps, not {steps}")
    fitting = [(layout, often) for layout, often in zip(LAYOUTS, _OFTEN, strict=True) if layout.nproc <= most_ranks]
    if not fitting:
        raise ValueError(f"chaos needs at least {min(layout.nproc for layout in LAYOUTS)} ranks, not {most_ranks}")
    dice = random.Random(f"checkpointless/{seed}/{number}/{overlap}")
    (layout,) = dice.choices([layout for layout, _ in fitting], [often for _, often in fitting])
    drawn = _Drawn(dice, seed, number, layout, steps)
    if overlap and dice.random() < 0.5:
        return dice.choice((drawn.during_recovery, drawn.at_once))()
    (group,) = dice.choices(list(_GROUPS), list(_GROUPS.values()))
    return drawn.alone(dice.choice(group))


def draw_faults(
    seed: int, count: int, *, nproc: int, steps: int, overlap: bool = False
) -> tuple[tuple[str, ...], Outcome]:
    """Faults for a job that is not ours, about whose shards and steps nothing is known but their number.

    Only kinds that any job of one node survives as long as each shard has a second holder; at most one rank loses
    its state at a time.

    Args:
        seed: of the draws.
        count: how many incidents.
        nproc: number of ranks.
        steps: optimizer steps of the job.
        overlap: let half of them be followed by an exception while they are recovered from.

    Returns:
        The specs, and the highest rung that is needed.

    Raises:
        ValueError: there are not enough steps to have one fault at a time.
    """
    usable = range(2, steps)
    if count > len(usable) // 2:
        raise ValueError(f"{count} faults, one at a time, need at least {2 * count + 2} steps, not {steps}")
    dice = random.Random(f"checkpointless/{seed}/job/{overlap}")
    width = len(usable) // count
    texts, deadly = [], False
    for index in range(count):
        step = usable[index * width] + dice.randrange(max(1, width - 1))
        kind = dice.choice((FaultKind.EXCEPTION, FaultKind.OOM, *DEADLY[:-1]))
        deadly |= kind in DEADLY
        texts.append(_spec(kind, dice.choice(_BEFORE_UPDATE), dice.randrange(nproc), step))
        if overlap and dice.random() < 0.5:
            phase = dice.choice((FaultPhase.INIT, FaultPhase.RECOVERY))
            texts.append(_spec(FaultKind.EXCEPTION, phase, dice.randrange(nproc), step - 1))
    return tuple(texts), Outcome.PROCESS if deadly else Outcome.IN_PROCESS


class _Drawn:
    """What the dice say of one case."""

    def __init__(self, dice: random.Random, seed: int, number: int, layout: Layout, steps: int) -> None:
        self._dice = dice
        self._seed = seed
        self._number = number
        self._layout = layout
        self._steps = steps
        self._step = dice.randrange(3, steps)
        self._rank = dice.randrange(layout.nproc)

    def alone(self, kind: FaultKind) -> Case:
        """One fault, at any moment of a step."""
        dice, rank, step = self._dice, self._rank, self._step
        if kind is FaultKind.BITFLIP:
            return self._bitflip()
        if kind in NODES:
            return self._node(kind)
        phase = dice.choice(_sorted(SUPPORT[kind] - SETUP_PHASES))
        more = ",seconds=1" if kind is FaultKind.SLOW else ""
        if kind is FaultKind.DATALOADER:
            more = f",how={dice.choice(('raise', 'kill'))}"
        outcome = Outcome.NOTHING if kind is FaultKind.SLOW else _outcome(kind)
        workers = 2 if kind is FaultKind.DATALOADER else 0
        return self._case(_spec(kind, phase, rank, step) + more, outcome=outcome, workers=workers)

    def during_recovery(self) -> Case:
        """A second fault while the first is recovered from."""
        dice, step = self._dice, self._step
        first = dice.choice((FaultKind.EXCEPTION, *DEADLY[:-1]))
        phase = dice.choice((FaultPhase.INIT, FaultPhase.RECOVERY, FaultPhase.TRANSFER))
        second = dice.choice((FaultKind.EXCEPTION, FaultKind.OOM, *DEADLY))
        rank, other = self._rank, dice.randrange(self._layout.nproc)
        if phase is FaultPhase.TRANSFER:  # comes only where something is sent
            first = dice.choice(DEADLY[:-1])
            other = dice.choice(sorted(self._layout.replicas(rank) - {rank}))
        faults = (_spec(first, dice.choice(_BEFORE_UPDATE), rank, step), _spec(second, phase, other, step - 1))
        lost = {where for kind, where in ((first, rank), (second, other)) if kind in DEADLY}
        if not lost:
            return self._case(*faults, outcome=Outcome.IN_PROCESS)
        return self._unless_all_are_lost(lost, Outcome.PROCESS, *faults)

    def at_once(self) -> Case:
        """Two ranks fail in the same phase of a step, and never all holders of a shard."""
        dice, rank = self._dice, self._rank
        others = set(range(self._layout.nproc)) - self._layout.replicas(rank)
        kinds = (FaultKind.EXCEPTION, FaultKind.OOM, *DEADLY[:-1])
        first, second = dice.choice(kinds), dice.choice(kinds)
        if not others:  # every rank holds all: a second fault must not cost it
            others, second = set(range(self._layout.nproc)) - {rank}, FaultKind.EXCEPTION
        phase, other = dice.choice(_BEFORE_UPDATE), dice.choice(sorted(others))
        faults = (_spec(first, phase, rank, self._step), _spec(second, phase, other, self._step))
        higher = Outcome.PROCESS if {first, second} & set(DEADLY) else Outcome.IN_PROCESS
        return self._case(*faults, outcome=higher)

    def _node(self, kind: FaultKind) -> Case:
        """The second of two nodes is lost; a spare waits only where it cannot come back by itself."""
        if self._layout.nproc % 2 or self._layout.nproc > 6:
            self._layout = Layout(4)
        half, step = self._layout.nproc // 2, self._step
        rank = half + self._rank % half
        faults = [_spec(kind, self._dice.choice(_BEFORE_UPDATE), rank, step)]
        if kind is FaultKind.PARTITION:
            faults[0] += f",seconds={_PARTITION_S}"
            # so that the job is not over before it is noticed
            faults.append(_spec(FaultKind.SLOW, FaultPhase.BETWEEN, 0, step) + f",seconds={_LINGER_S}")
        lost = set(range(half, 2 * half)) if kind is FaultKind.NODE else set()  # the others are taken back
        spares = int(kind is FaultKind.NODE)
        return self._unless_all_are_lost(lost, Outcome.NODE, *faults, nodes=2, spares=spares)

    def _bitflip(self) -> Case:
        """A bit of a replica, found in the next recovery; or of a bucket on its way."""
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
        if nodes == 1 and self._dice.random() < 0.5:
            # NeMo's checkpoints do not hold the random streams
            return self._case(*faults, outcome=Outcome.STORAGE, checkpoint_every=2, dropout=0.0)
        reason = f"no living rank holds the shard of ranks {_ranks(gone)}"
        return self._case(*faults, outcome=Outcome.REFUSED, reason=reason, nodes=nodes, spares=spares)

    def _groups(self) -> list[frozenset[int]]:
        return sorted({self._layout.replicas(rank) for rank in range(self._layout.nproc)}, key=min)

    def _case(
        self,
        *faults: str,
        outcome: Outcome,
        reason: str = "",
        nodes: int = 1,
        spares: int = 0,
        workers: int = 0,
        checksum: bool = False,
        checkpoint_every: int = 0,
        dropout: float = DROPOUT,
    ) -> Case:
        return Case(
            self._seed,
            self._number,
            self._layout,
            self._steps,
            faults,
            outcome,
            reason,
            nodes,
            spares,
            workers,
            checksum,
            checkpoint_every,
            dropout,
        )


def _outcome(kind: FaultKind) -> Outcome:
    return Outcome.IN_PROCESS if kind in IN_PROCESS else Outcome.PROCESS


def _spec(kind: FaultKind, phase: FaultPhase, rank: int, step: int) -> str:
    return f"{kind.value}@{phase.value}:rank={rank},step={step}"


def _sorted(phases: frozenset[FaultPhase]) -> Sequence[FaultPhase]:
    return [phase for phase in FaultPhase if phase in phases]


def _ranks(ranks: Sequence[int] | frozenset[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
