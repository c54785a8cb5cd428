"""Cause faults: the calls that a training loop makes at each phase, and what they do when a fault is due."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from checkpointless.environment import FAULTS_ENV, own_run_dir
from checkpointless.faults import device, loader, node
from checkpointless.faults.damage import flip_a_bit
from checkpointless.faults.ledger import FaultLedger
from checkpointless.faults.spec import (
    NODE_KINDS,
    SETUP_PHASES,
    FaultKind,
    FaultPhase,
    FaultSpec,
    FaultSpecError,
    parse_all,
)
from checkpointless.telemetry.event_names import EventName
from checkpointless.telemetry.events import event_log
from checkpointless.telemetry.scribe import flush_all

logger = logging.getLogger(__name__)

INJECTED_EXIT_CODE = 17
_HANG_S = 3600.0


class InjectedFault(RuntimeError):
    """Raised by a fault of kind ``exception``, and in a data-loader worker by one of kind ``dataloader``."""


class FaultInjector:
    """Causes the faults of one rank when they are due.

    Args:
        specs: all faults of the job, in the same order on all ranks.
        rank: global rank of this process.
        ledger: remembers which faults have been caused.
        of_job: whether these are the faults that the job was launched with, before which a script's own give way.

    Attributes:
        target: function that returns the tensor of this rank's training state that is damaged; set by the code
            that knows where the state is.
        batches: function that returns torch's iterator over this rank's training data, or None if the data loader
            has no workers; set by the code that knows the iterator.
    """

    def __init__(self, specs: Sequence[FaultSpec], rank: int, ledger: FaultLedger, *, of_job: bool = False) -> None:
        self.target: Callable[[], Any] | None = None
        self.batches: Callable[[], Any] | None = None
        self.rank = rank
        self.ledger = ledger
        self.of_job = of_job
        self._by_phase: dict[FaultPhase, list[tuple[int, FaultSpec]]] = {}
        for index, spec in enumerate(specs):
            if spec.rank in (None, rank):
                self._by_phase.setdefault(spec.phase, []).append((index, spec))

    def at(self, phase: FaultPhase, step: int, generation: int, target: Callable[[], Any] | None = None) -> None:
        """Cause the faults that are due; return if none is, or if this process survives them.

        Args:
            phase: the phase that this rank is in.
            step: the optimizer step in progress, counted from 1; in a set-up phase, the last committed step.
            generation: the generation that this rank is in. In generation 0, set-up phases cause nothing.
            target: function that returns the tensor that this phase works on, which is contiguous and not empty.
                Default: :attr:`target`.

        Raises:
            InjectedFault: a fault of kind ``exception`` was due, or a data-loader worker raised it.
            RuntimeError: torch raised it, because the fault is one that torch reports.
            FaultSpecError: the fault cannot be caused here; it does not count as caused.
        """
        if phase in SETUP_PHASES and generation < 1:
            return
        for index, spec in self._by_phase.get(phase, ()):
            if spec.step in (None, step) and self._drawn(index, spec, step, generation):
                if self.ledger.is_spent(index, spec):  # the step is made again, perhaps where it cannot be caused
                    continue
                cause = self._prepare(spec, target or self.target)
                self._announce(spec, step, generation)  # first: it takes a while, in which another fault may come
                self._cause(index, spec, cause, rank=self.rank, step=step, generation=generation)

    def _cause(self, index: int, spec: FaultSpec, cause: Callable[[], None], **about: Any) -> None:
        """Count the fault as caused and cause it, if it is still to be caused.

        Another rank's fault may interrupt this at any moment. What was not caused then does not count.
        """
        claimed = began = False
        try:
            claimed = self.ledger.claim(index, spec, **about)
            if claimed:
                began = spec.kind not in _NEVER_RETURN
                cause()
        except BaseException:
            if claimed and not began:
                self.ledger.withdraw(index, spec)
            raise

    def _drawn(self, index: int, spec: FaultSpec, step: int, generation: int) -> bool:
        """Return whether the fault is drawn. Each step has a separate draw, which is the same in every process."""
        if spec.prob is None:
            return True
        draws = random.Random(f"{spec.seed}/{index}/{self.rank}/{step}/{generation}")
        return draws.random() < spec.prob

    def _announce(self, spec: FaultSpec, step: int, generation: int) -> None:
        text = spec.text or str(spec)
        event_log().emit(
            EventName.FAULT_INJECTED,
            "point",
            generation=generation,
            rank=self.rank,
            spec=text,
            step=step,
            phase=spec.phase,
        )
        logger.warning("rank %d: injecting %s", self.rank, text)
        flush_all()  # the fault may end this process

    def _prepare(self, spec: FaultSpec, target: Callable[[], Any] | None) -> Callable[[], None]:
        """Return the function that causes the fault.

        Raises:
            FaultSpecError: the fault cannot be caused here.
        """
        text = spec.text or str(spec)
        if spec.kind is FaultKind.EXCEPTION:
            return lambda: _raise(InjectedFault(f"injected fault {text}"))
        if spec.kind is FaultKind.SLOW:
            return lambda: time.sleep(spec.duration_s)
        if spec.kind is FaultKind.OOM:
            if not device.has_torch():
                raise _impossible(text, "this process has not imported torch, so torch cannot run out of memory")
            return lambda: _must_raise(device.run_out_of_memory, text)
        if spec.kind is FaultKind.CUDA:
            if not device.has_cuda():
                raise _impossible(text, "it needs ranks on GPUs, and CUDA is not available here")
            return lambda: _must_raise(device.fail_device_assert, text)
        if spec.kind is FaultKind.DATALOADER:
            batches = self.batches() if self.batches is not None else None
            if batches is None:
                raise _impossible(text, "the data loader of this rank has no workers (num_workers=0)")
            if spec.how == "kill":
                return lambda: _must_raise(lambda: loader.kill_worker(batches), text)
            error = InjectedFault(f"injected fault {text}")
            return lambda: _must_raise(lambda: loader.raise_in_worker(batches, error), text)
        if spec.kind in NODE_KINDS:
            agent = node.agent_pid()
            if agent is None:
                raise _impossible(text, "a node can only be lost in a job of several nodes")
            if spec.kind is FaultKind.PARTITION:
                return lambda: node.cut_off(agent, spec.duration_s)
            return lambda: (node.lose if spec.kind is FaultKind.NODE else node.drop_coordinator)(agent)
        if spec.kind is FaultKind.BITFLIP:
            if target is None:
                raise _impossible(text, "the strategy does not say where this rank's state is")
            return lambda: flip_a_bit(target())
        return _ENDS[spec.kind]


def _impossible(text: str, why: str) -> FaultSpecError:
    return FaultSpecError(f"fault {text!r}: {why}")


def _raise(error: Exception) -> None:
    raise error


def _must_raise(cause: Callable[[], None], text: str) -> None:
    cause()
    raise _impossible(text, "torch reported nothing")


def _hang() -> None:
    while True:
        time.sleep(_HANG_S)


#: Kinds that end or stop this process; causing them needs nothing but the process.
_ENDS: dict[FaultKind, Callable[[], Any]] = {
    FaultKind.SIGTERM: lambda: os.kill(os.getpid(), signal.SIGTERM),
    FaultKind.SIGKILL: lambda: os.kill(os.getpid(), signal.SIGKILL),
    FaultKind.SIGSTOP: lambda: os.kill(os.getpid(), signal.SIGSTOP),
    FaultKind.EXIT: lambda: os._exit(INJECTED_EXIT_CODE),
    FaultKind.SEGFAULT: lambda: ctypes.string_at(0),
    FaultKind.ABORT: os.abort,
    FaultKind.GIL: lambda: ctypes.PyDLL(None).sleep(
        int(_HANG_S)
    ),  # unlike CDLL, PyDLL does not release the GIL in a call
    FaultKind.HANG: _hang,
}
#: Kinds after which this process runs no more code.
_NEVER_RETURN = frozenset({FaultKind.SIGKILL, FaultKind.EXIT, FaultKind.SEGFAULT, FaultKind.ABORT})


def from_environment(rank: int) -> FaultInjector | None:
    """Return the injector for ``CHECKPOINTLESS_FAULTS`` (a JSON list of specs), or None if it asks for nothing.

    Args:
        rank: global rank of this process.

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
    specs = parse_all(texts, world_size=None, max_steps=None)
    return FaultInjector(specs, rank, FaultLedger(own_run_dir()), of_job=True)
