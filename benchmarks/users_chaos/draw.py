"""Draw chaos for users' runs from a seed: two features, a layout and one to three faults.

A case is a pure function of seed and number. In each, every shard keeps a living holder, so that the run must end
as without faults, or be refused before it starts.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

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
from checkpointless.system.layout import Layout

#: A NeMo script can have these; ``resume``, ``two-fits`` and ``fits-two`` are no features of the script itself.
FEATURES = (
    *("ema", "earlystop", "validation", "val-loaders", "modelckpt", "monitored", "async-save", "dated"),
    *("moe-bias", "global-aux-loss", "fp16", "module-state", "callback-hooks", "own-data", "epochs", "uneven"),
    *("cyclic", "workers", "plateau", "csv", "tensorboard", "max-time", "resume", "two-fits", "fits-two"),
)
PLAIN_FEATURES = ("batchnorm", "randperm")
#: The first feature of each pair means nothing without the second.
_NEEDS = {"async-save": "modelckpt", "dated": "modelckpt", "uneven": "epochs"}
#: These look at the loss of one validation, which several loaders do not have.
_ONE_LOSS = frozenset({"earlystop", "monitored", "plateau"})
_EXPERTS = frozenset({"moe-bias", "global-aux-loss"})
_FITS = {"two-fits": (3, 6), "fits-two": (6, 3)}
_RESUMED_AT = 4
_PLAIN = "plain_loop.py"

LAYOUTS = (
    Layout.on_one_node(2),
    Layout.on_one_node(4),
    Layout.on_one_node(4, tensor=2),
    Layout.on_one_node(4, pipeline=2),
    Layout.on_one_node(4, expert=2),
)
_OFTEN = (1, 4, 3, 2, 2)
_WORDS = {"tp": "--tensor-parallel", "pp": "--pipeline-parallel", "ep": "--expert-parallel"}

_GROUPS = {IN_PROCESS: 6, DEADLY: 6, HANGING: 2, NODES: 1, (FaultKind.SLOW,): 1, (FaultKind.BITFLIP,): 1}
#: A loop without Lightning announces only these phases.
_PLAIN_PHASES = (
    FaultPhase.BEFORE_OPTIMIZER,
    FaultPhase.OPTIMIZER,
    FaultPhase.AFTER_OPTIMIZER,
    FaultPhase.BETWEEN,
)
_BEFORE_UPDATE = (FaultPhase.DATA, FaultPhase.FORWARD, FaultPhase.BACKWARD, FaultPhase.SYNC)
_PARTITION_S, _LINGER_S = 5, 4


@dataclass(frozen=True)
class UsersCase:
    """Describes one run with faults.

    Attributes:
        seed: that it was drawn from.
        number: which of that seed's.
        features: of the script, two or what follows from two.
        layout: of the job.
        steps: optimizer steps, of each fit.
        faults: specs.
        busy: whether two busy loops run beside it.
        script: a file of tests/ranks/users.
        resumed: begin at the checkpoint of a job of so many steps (0: at the beginning).
        nodes: how many nodes the ranks are on.
        spares: how many more wait.
    """

    seed: int
    number: int
    features: tuple[str, ...]
    layout: Layout
    steps: tuple[int, ...]
    faults: tuple[str, ...]
    busy: bool
    script: str = "train.py"
    resumed: int = 0
    nodes: int = 1
    spares: int = 0

    @property
    def words(self) -> tuple[str, ...]:
        """Return the script's arguments."""
        sizes = [word for key, size in self.layout.sizes.items() for word in (_WORDS[key], str(size))]
        return ("--steps", *map(str, self.steps), "--features", ",".join(self.features), *sizes)

    @property
    def shown_features(self) -> tuple[str, ...]:
        """Return for tables the script's features, and what else the run is."""
        fits = next((name for name, steps in _FITS.items() if steps == self.steps), None)
        return (*self.features, *(["resume"] if self.resumed else []), *([fits] if fits else []))

    @property
    def text(self) -> str:
        """Describe the case for people."""
        where = self.layout.text + (f", {self.nodes} nodes" if self.nodes > 1 else "")
        what = ",".join(self.shown_features) or "nothing more"
        return f"{self.script}: {what}; {where}{'; busy' if self.busy else ''}: {' '.join(self.faults)}"


def draw(seed: int, number: int) -> UsersCase:
    """Draw the case of that number; the others do not matter to it."""
    dice = random.Random(f"users/{seed}/{number}")
    if dice.random() < 0.1:
        return _draw_plain(dice, seed, number)
    names = set(dice.sample(FEATURES, 2))
    if {"two-fits", "fits-two"} <= names:
        names.discard("fits-two")
    names |= {_NEEDS[name] for name in names if name in _NEEDS}
    if names & _ONE_LOSS:
        names.discard("val-loaders")
    resumed = _RESUMED_AT if "resume" in names else 0
    steps = next((fits for name, fits in _FITS.items() if name in names), (8 if resumed else 6,))
    if resumed and len(steps) > 1:
        steps = (8,)
    (layout,) = dice.choices(LAYOUTS, _OFTEN)
    if layout.expert > 1 and "fp16" in names:
        layout = Layout.on_one_node(4)
    if layout.tensor > 1 and names & _EXPERTS:  # Megatron wants sequence parallelism with them
        layout = Layout.on_one_node(4)
    first = resumed + 1
    # The state that a second fit begins with has a number of its own.
    missing = steps[0] + 1 if len(steps) > 1 else 0
    faults = _Faults(dice, layout, first, min(max(steps), 6 if "earlystop" in names else 99), missing=missing)
    specs, nodes, spares = faults.draw()
    if any(parse(spec).kind is FaultKind.DATALOADER for spec in specs):
        names.add("workers")
    features = tuple(name for name in FEATURES if name in names and name not in ("resume", *_FITS))
    busy = dice.random() < 0.5
    return UsersCase(seed, number, features, layout, steps, specs, busy, "train.py", resumed, nodes, spares)


def _draw_plain(dice: random.Random, seed: int, number: int) -> UsersCase:
    layout = Layout.on_one_node(3, instances=3)
    faults = _Faults(dice, layout, 1, 6, plain=True)
    specs, _, _ = faults.draw()
    return UsersCase(seed, number, PLAIN_FEATURES, layout, (6,), specs, dice.random() < 0.5, _PLAIN)


class _Faults:
    """Rolls the dice for the faults.

    Args:
        dice: are rolled.
        layout: of the job.
        first: the first step that it makes.
        last: the last.
        plain: whether it has a loop of its own, which announces fewer phases.
        missing: the number of no step.
    """

    def __init__(
        self, dice: random.Random, layout: Layout, first: int, last: int, plain: bool = False, missing: int = 0
    ) -> None:
        self._dice = dice
        self._layout = layout
        self._first = first
        self._last = last
        self._plain = plain
        self._missing = missing

    def draw(self) -> tuple[tuple[str, ...], int, int]:
        """Return specs, nodes and spares."""
        count = self._dice.choices((1, 2, 3), (4, 3, 2))[0]
        (group,) = self._dice.choices(list(_GROUPS), list(_GROUPS.values()))
        kind = self._dice.choice(group)
        has_nodes = not self._plain and self._layout.world_size == 4 and not self._layout.sizes
        if kind in NODES and has_nodes and self._last - self._first > 1:
            return self._node(kind)
        specs: list[str] = []
        # Faults are two steps apart: who was filled after one has committed a step before the next.
        usable = [
            step
            for step in range(self._first + self._dice.randrange(2), self._last + 1, 2)
            if step != self._missing
        ]
        steps = self._dice.sample(usable, min(count, len(usable)))
        for step in sorted(steps):
            (group,) = self._dice.choices(list(_GROUPS), list(_GROUPS.values()))
            specs += self._of(self._dice.choice(group), step)
        return tuple(specs), 1, 0

    def _of(self, kind: FaultKind, step: int) -> list[str]:
        """Return one fault, or one and another that comes while it is handled."""
        dice, rank = self._dice, self._dice.randrange(self._layout.world_size)
        if kind in NODES or (self._plain and kind is FaultKind.DATALOADER):
            kind = FaultKind.EXCEPTION
        if kind is FaultKind.BITFLIP:
            return self._bitflip(rank, step)
        if kind is FaultKind.DATALOADER:
            return [f"{_spec(kind, FaultPhase.DATA, rank, step)},how={dice.choice(('raise', 'kill'))}"]
        phases = [phase for phase in FaultPhase if phase in kind.phases - SETUP_PHASES]
        if step == self._last:
            phases.remove(FaultPhase.BETWEEN)
        phase = dice.choice([each for each in phases if not self._plain or each in _PLAIN_PHASES])
        first = _spec(kind, phase, rank, step) + (",seconds=1" if kind is FaultKind.SLOW else "")
        alone = kind in (FaultKind.SLOW, FaultKind.SIGTERM)  # the latter leaves at the end of the step
        if alone or phase not in _BEFORE_UPDATE or dice.random() < 0.5:
            return [first]
        return [first, self._second(kind in (*DEADLY, *HANGING), rank, step - 1)]

    def _second(self, lethal: bool, rank: int, committed: int) -> str:
        """Return a fault in the recovery from the first that never costs the last holder of a shard."""
        dice, everybody = self._dice, set(range(self._layout.world_size))
        others = sorted(everybody - self._layout.replicas(rank)) if lethal else sorted(everybody)
        kinds = (FaultKind.EXCEPTION, FaultKind.OOM, *(DEADLY[:-1] if others else ()))
        second = dice.choice(kinds)
        other = dice.choice(others if second in DEADLY else sorted(everybody))
        return _spec(second, dice.choice((FaultPhase.INIT, FaultPhase.RECOVERY)), other, committed)

    def _bitflip(self, rank: int, step: int) -> list[str]:
        """Return a kill and, where one can follow, a bit flip of a bucket on its way."""
        partners = sorted(self._layout.replicas(rank) - {rank})
        phase = FaultPhase.BEFORE_OPTIMIZER if self._plain else FaultPhase.FORWARD
        kill = _spec(FaultKind.SIGKILL, phase, rank, step)
        if self._plain or step == self._first:
            return [kill]
        return [kill, _spec(FaultKind.BITFLIP, FaultPhase.TRANSFER, partners[0], step - 1)]

    def _node(self, kind: FaultKind) -> tuple[tuple[str, ...], int, int]:
        """Return faults that lose the second of two nodes."""
        step = self._dice.choice([step for step in range(self._first + 1, self._last) if step != self._missing])
        faults = [_spec(kind, self._dice.choice(_BEFORE_UPDATE), 2 + self._dice.randrange(2), step)]
        if kind is FaultKind.PARTITION:
            faults[0] += f",seconds={_PARTITION_S}"
            faults.append(_spec(FaultKind.SLOW, FaultPhase.BETWEEN, 0, step) + f",seconds={_LINGER_S}")
        return tuple(faults), 2, int(kind is FaultKind.NODE)


def _spec(kind: FaultKind, phase: FaultPhase, rank: int, step: int) -> str:
    return f"{kind.value}@{phase.value}:rank={rank},step={step}"
