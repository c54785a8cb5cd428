"""Causing faults: the calls that a training loop makes at each phase, and what they do where a fault is due."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from checkpointless.faults.ledger import FaultLedger
from checkpointless.faults.spec import SETUP_PHASES, FaultKind, FaultPhase, FaultSpec, FaultSpecError, parse_all
from checkpointless.telemetry.events import FAULT_INJECTED, RUN_DIR_ENV, event_log

logger = logging.getLogger(__name__)

FAULTS_ENV = "CHECKPOINTLESS_FAULTS"
AGENT_PID_ENV = "CHECKPOINTLESS_AGENT_PID"
INJECTED_EXIT_CODE = 17
_HANG_S = 3600.0


class InjectedFault(RuntimeError):
    """The exception that a fault of kind ``exception`` raises."""


class FaultInjector:
    """Causes the faults of one rank when they are due.

    Args:
        specs: all faults of the job, in the order that all ranks share.
        rank: this rank.
        ledger: remembers what has been caused.

    Attributes:
        damage: flips a bit of this rank's training state; set by who knows where that is.
    """

    def __init__(self, specs: Sequence[FaultSpec], rank: int, ledger: FaultLedger) -> None:
        self.damage: Callable[[], None] | None = None
        self.rank = rank
        self.ledger = ledger
        self._by_phase: dict[FaultPhase, list[tuple[int, FaultSpec]]] = {}
        for index, spec in enumerate(specs):
            if spec.rank in (None, rank):
                self._by_phase.setdefault(spec.phase, []).append((index, spec))

    def at(self, phase: FaultPhase, step: int, generation: int, damage: Callable[[], None] | None = None) -> None:
        """Cause what is due here; returns if nothing is, or if it is survived.

        Args:
            phase: where this rank is.
            step: the optimizer step being made, counted from 1; in a set-up phase the last one committed.
            generation: the generation that this rank is in. In generation 0 set-up phases cause nothing.
            damage: flips a bit of what this phase works on; default: :attr:`damage`.

        Raises:
            InjectedFault: a fault of kind ``exception`` was due.
            FaultSpecError: a bit is to be flipped and nobody has said where.
        """
        if phase in SETUP_PHASES and generation < 1:
            return
        for index, spec in self._by_phase.get(phase, ()):
            if spec.step in (None, step) and self._drawn(index, spec, step, generation):
                about = {"rank": self.rank, "step": step, "generation": generation}
                if self.ledger.claim(index, spec, **about):
                    self._cause(spec, step, generation, damage or self.damage)

    def _drawn(self, index: int, spec: FaultSpec, step: int, generation: int) -> bool:
        """Whether chance wants it: a draw of its own for each step, the same in whichever process it is made."""
        if spec.prob is None:
            return True
        draws = random.Random(f"{spec.seed}/{index}/{self.rank}/{step}/{generation}")
        return draws.random() < spec.prob

    def _cause(self, spec: FaultSpec, step: int, generation: int, damage: Callable[[], None] | None) -> None:
        text = spec.text or str(spec)
        event_log().emit(
            FAULT_INJECTED, "point", generation=generation, rank=self.rank, spec=text, step=step, phase=spec.phase
        )
        logger.warning("rank %d: injecting %s", self.rank, text)
        if spec.kind is FaultKind.EXCEPTION:
            raise InjectedFault(f"injected fault {text}")
        if spec.kind is FaultKind.SIGKILL:
            os.kill(os.getpid(), signal.SIGKILL)
        elif spec.kind is FaultKind.EXIT:
            os._exit(INJECTED_EXIT_CODE)
        elif spec.kind is FaultKind.SEGFAULT:
            ctypes.string_at(0)
        elif spec.kind is FaultKind.ABORT:
            os.abort()
        elif spec.kind is FaultKind.SIGSTOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif spec.kind is FaultKind.GIL:
            ctypes.PyDLL(None).sleep(int(_HANG_S))  # unlike CDLL, without letting the interpreter go
        elif spec.kind is FaultKind.HANG:
            while True:
                time.sleep(_HANG_S)
        elif spec.kind is FaultKind.NODE:
            agent = os.environ.get(AGENT_PID_ENV)
            if agent is None:
                raise FaultSpecError(f"fault {text!r}: a node can only be lost in a job of several nodes")
            os.kill(int(agent), signal.SIGKILL)  # its ranks die with it
            time.sleep(_HANG_S)
        elif spec.kind is FaultKind.BITFLIP and damage is not None:
            damage()
        elif spec.kind is FaultKind.BITFLIP:
            raise FaultSpecError(f"fault {text!r}: the strategy does not say where this rank's state is")
        else:
            raise FaultSpecError(f"fault {text!r}: kind {spec.kind.value!r} is not supported yet in this version")


def from_environment(rank: int) -> FaultInjector | None:
    """The injector that ``CHECKPOINTLESS_FAULTS`` (a JSON list of specs) asks for; None if it asks for nothing.

    Args:
        rank: this rank.

    Raises:
        FaultSpecError: the variable is not a JSON list of fault specs.
    """
    value = os.environ.get(FAULTS_ENV)
    if not value:
        return None
    try:
        texts = json.loads(value)
    except ValueError:
        texts = None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise FaultSpecError(f"{FAULTS_ENV} must be a JSON list of fault specs, not {value!r}")
    if not texts:
        return None
    run_dir = os.environ.get(RUN_DIR_ENV)
    specs = parse_all(texts, world_size=None, max_steps=None)
    return FaultInjector(specs, rank, FaultLedger(Path(run_dir) if run_dir else None))
