"""Fault specs, ``KIND[@PHASE][:key=value,...]``: parsing, writing and checking them."""

from __future__ import annotations

import difflib
import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import TypeVar


class FaultPhase(enum.Enum):
    """The phase of a step, or of the set-up of a generation, in which a fault happens."""

    DATA = "data"
    FORWARD = "forward"
    ACTIVATION = "activation"
    BACKWARD = "backward"
    GRADIENT = "gradient"
    SYNC = "sync"
    BEFORE_OPTIMIZER = "before_optimizer"
    OPTIMIZER = "optimizer"
    AFTER_OPTIMIZER = "after_optimizer"
    BETWEEN = "between"
    INIT = "init"
    TRANSFER = "transfer"
    RECOVERY = "recovery"


#: Phases in the set-up of a generation after the first; ``step`` is then the last step committed before it.
SETUP_PHASES = frozenset({FaultPhase.INIT, FaultPhase.TRANSFER, FaultPhase.RECOVERY})

#: Phases that strategies and `checkpointless.integrations.megatron_bridge` announce, and that a loop of one's own
#: has to announce itself.
ANNOUNCED_BY_FRAMEWORKS = frozenset(
    {FaultPhase.DATA, FaultPhase.FORWARD, FaultPhase.BACKWARD, FaultPhase.SYNC, FaultPhase.INIT}
)

#: Phases of most kinds.
USUAL_PHASES = frozenset(FaultPhase) - {FaultPhase.ACTIVATION, FaultPhase.GRADIENT}
_NEW_PROCESS = "recovered by a new process"
_BY_HEARTBEAT = f"found by its heartbeat; {_NEW_PROCESS}"
_BY_CHECKSUM = "found by checksums; refilled from the majority, or the job ends and says why"
_LOST_NODE = "taken for a lost node, which is taken back"
_OTHER_PROCESSES = "a spare node's processes, or by those of the node when it is back"


class FaultKind(enum.Enum):
    """What goes wrong, with its expected outcome, in which the losses are those without the fault."""

    expected: str
    phases: frozenset[FaultPhase]
    variants: tuple[str, ...]  # ``how=``, the default one first
    default_s: float | None  # how many seconds it lasts, unless ``seconds=`` is given; None: it has no duration
    is_of_node: bool  # whether it happens to a node, so the job must have several nodes

    EXCEPTION = "exception", "recovered in process"
    OOM = "oom", "recovered in process"
    DATALOADER = "dataloader", "recovered in process, with new workers", {FaultPhase.DATA}, ("raise", "kill")
    SLOW = "slow", "no incident, below the heartbeat limit; above it a hang", USUAL_PHASES, (), 2.0
    SIGTERM = "sigterm", f"Lightning leaves at the end of the step; {_NEW_PROCESS}"
    SIGKILL = "sigkill", _NEW_PROCESS
    EXIT = "exit", _NEW_PROCESS
    SEGFAULT = "segfault", _NEW_PROCESS
    ABORT = "abort", _NEW_PROCESS
    HANG = "hang", _BY_HEARTBEAT
    SIGSTOP = "sigstop", _BY_HEARTBEAT
    GIL = "gil", _BY_HEARTBEAT
    CUDA = "cuda", f"found by the health check; {_NEW_PROCESS}", USUAL_PHASES - SETUP_PHASES
    PARTITION = "partition", f"{_LOST_NODE} with its processes", USUAL_PHASES, (), 15.0, True
    STORE = "store", f"{_LOST_NODE} at once with its processes", USUAL_PHASES, (), None, True
    NODE = "node", f"recovered by {_OTHER_PROCESSES}", USUAL_PHASES, (), None, True
    BITFLIP = "bitflip", _BY_CHECKSUM, frozenset(FaultPhase) - {FaultPhase.INIT, FaultPhase.RECOVERY}

    def __new__(
        cls,
        name: str,
        expected: str,
        phases: Iterable[FaultPhase] = USUAL_PHASES,
        variants: tuple[str, ...] = (),
        default_s: float | None = None,
        is_of_node: bool = False,
    ) -> FaultKind:
        kind = object.__new__(cls)
        kind._value_ = name
        kind.expected, kind.phases, kind.variants = expected, frozenset(phases), variants
        kind.default_s, kind.is_of_node = default_s, is_of_node
        return kind


#: Groups of kinds: those after which the process goes on, and those after which another process replaces it.
IN_PROCESS = (FaultKind.EXCEPTION, FaultKind.OOM, FaultKind.DATALOADER)
DEADLY = (FaultKind.SIGKILL, FaultKind.EXIT, FaultKind.SEGFAULT, FaultKind.ABORT, FaultKind.SIGTERM)
HANGING = (FaultKind.HANG, FaultKind.GIL, FaultKind.SIGSTOP)
NODES = (FaultKind.NODE, FaultKind.PARTITION, FaultKind.STORE)

_KEYS = ("rank", "step", "times", "prob", "seed", "how", "seconds")
_LONGEST_S = 1e9
_Member = TypeVar("_Member", bound=enum.Enum)
_FORM = "KIND[@PHASE][:key=value,...], for example exception@forward:rank=2,step=7"


class FaultSpecError(ValueError):
    """A fault spec that cannot be understood or can never happen; the message says why in one line."""


@dataclass(frozen=True)
class FaultSpec:
    """One fault to be caused."""

    kind: FaultKind
    phase: FaultPhase = FaultPhase.FORWARD
    rank: int | None = None  # rank on which the fault happens; None (only with ``prob``) means any rank
    # optimizer step in which the fault happens, counted from 1 (in a set-up phase: the committed step after which
    # it happens); None (only with ``prob``) means any step
    step: int | None = None
    times: int = 1  # how often the fault happens in all, over every process of the rank
    prob: float | None = None  # probability at each opportunity, in (0, 1]; None means that the fault is certain
    seed: int = 0  # seed of the draws for ``prob``, which never touch the training's random numbers
    how: str | None = None  # variant of the kind; None means the kind's first
    seconds: float | None = None  # duration in seconds, for kinds that have one; None means the kind's own
    text: str = field(default="", compare=False)

    @property
    def duration_s(self) -> float:
        """The duration of the fault in seconds (0 if its kind has none)."""
        return (self.kind.default_s or 0.0) if self.seconds is None else self.seconds

    def __str__(self) -> str:
        given = ((each.name, getattr(self, each.name), each.default) for each in fields(self) if each.name in _KEYS)
        options = [
            f"{key}={value!r}" if isinstance(value, float) else f"{key}={value}"
            for key, value, default in given
            if value != default
        ]
        return f"{self.kind.value}@{self.phase.value}" + (":" + ",".join(options) if options else "")


def parse(text: str) -> FaultSpec:
    """Read one fault spec; ``FaultSpecError`` if it is malformed, or of a fault that this version cannot cause."""
    head, colon, tail = text.strip().partition(":")
    kind_text, at, phase_text = head.partition("@")
    kind = _member(text, "kind", kind_text, FaultKind)
    phase = _member(text, "phase", phase_text, FaultPhase) if at else FaultPhase.FORWARD
    if phase not in kind.phases:
        phases = _names(phase for phase in FaultPhase if phase in kind.phases)
        raise _error(text, f"{kind.value!r} cannot come in phase {phase.value!r}; use {phases}")
    options = _options(text, tail) if colon else {}
    spec = FaultSpec(
        kind=kind,
        phase=phase,
        rank=_integer(text, options, "rank", minimum=0),
        step=_integer(text, options, "step", minimum=0 if phase in SETUP_PHASES else 1),
        times=_integer(text, options, "times", minimum=1) or 1,
        prob=_number(text, options, "prob", 1),
        seed=_integer(text, options, "seed", minimum=0) or 0,
        how=options.get("how"),
        seconds=_number(text, options, "seconds", _LONGEST_S),
        text=text,
    )
    if spec.prob is None:
        missing = [key for key, value in (("rank", spec.rank), ("step", spec.step)) if value is None]
        if missing:
            raise _error(
                text,
                f"say {' and '.join(missing)}, for example {kind.value}@{phase.value}:rank=0,step=3 "
                "(only a fault with prob= may leave them out)",
            )
        if "seed" in options:
            raise _error(text, "seed= needs prob=")
    variants = kind.variants
    if spec.how is not None and not variants:
        raise _error(text, f"kind {kind.value!r} has no variants, so leave how= out")
    if spec.how is not None and spec.how not in variants:
        raise _error(
            text, f"unknown how={spec.how!r}{_suggestion(spec.how, variants)}; use {' or '.join(variants)}"
        )
    if spec.seconds is not None and kind.default_s is None:
        raise _error(
            text, f"seconds= applies to {_names(each for each in FaultKind if each.default_s)}, not to {kind.value}"
        )
    return spec


def validate(
    specs: Iterable[FaultSpec], world_size: int | None, max_steps: int | None, cuda: bool | None = None
) -> None:
    """Check that each fault can happen in this job, as far as it is known (None: not)."""
    for spec in specs:
        shown = spec.text or str(spec)
        if world_size is not None and spec.rank is not None and spec.rank >= world_size:
            raise _error(shown, f"rank {spec.rank} is not one of the {world_size} ranks 0 to {world_size - 1}")
        if max_steps is not None and spec.step is not None and spec.step > max_steps:
            raise _error(shown, f"step {spec.step} never comes: the run has {max_steps} steps")
        if max_steps is not None and spec.phase is FaultPhase.BETWEEN and spec.step == max_steps:
            raise _error(shown, f"step {spec.step} is the last one: no next step follows it")
        if cuda is False and spec.kind is FaultKind.CUDA:
            raise _error(shown, "it needs ranks on GPUs, and CUDA is not available here")


def parse_all(
    texts: Sequence[str], world_size: int | None, max_steps: int | None, cuda: bool | None = None
) -> tuple[FaultSpec, ...]:
    """Read and check several specs, as :func:`parse` and :func:`validate` do."""
    specs = tuple(parse(text) for text in texts)
    validate(specs, world_size, max_steps, cuda)
    return specs


def _member(text: str, what: str, name: str, members: type[_Member]) -> _Member:
    by_name = {str(member.value): member for member in members}
    name = name.strip()
    if not name:
        raise _error(text, f"it names no {what}; write {_FORM}")
    if name not in by_name:
        names = tuple(by_name)
        raise _error(text, f"unknown {what} {name!r}{_suggestion(name, names)}; {what}s are {', '.join(names)}")
    return by_name[name]


def _options(text: str, tail: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in tail.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key or not value:
            raise _error(text, f"{part!r} is not key=value")
        if key not in _KEYS:
            raise _error(text, f"unknown key {key!r}{_suggestion(key, _KEYS)}; keys are {', '.join(_KEYS)}")
        if key in options:
            raise _error(text, f"{key}= is there twice")
        options[key] = value
    return options


def _integer(text: str, options: dict[str, str], key: str, minimum: int) -> int | None:
    value = options.get(key)
    if value is None:
        return None
    if not (value.isascii() and value.isdecimal() and len(value) < 19 and int(value) >= minimum):
        raise _error(text, f"{key} must be a whole number of at least {minimum}, not {value!r}")
    return int(value)


def _number(text: str, options: dict[str, str], key: str, most: float) -> float | None:
    """Return a number above 0 and at most ``most``; None if it is not given."""
    value = options.get(key)
    if value is None:
        return None
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0.0 < number <= most:
        raise _error(text, f"{key} must be above 0 and at most {most:g}, not {value!r}")
    return number


def _suggestion(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _names(members: Iterable[enum.Enum]) -> str:
    return ", ".join(str(member.value) for member in members)


def _error(text: str, problem: str) -> FaultSpecError:
    return FaultSpecError(f"fault {text!r}: {problem}")
