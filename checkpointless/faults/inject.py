"""Cause faults: the calls that a training loop makes at each phase, and what they do when a fault is due."""

from __future__ import annotations

import ctypes
import itertools
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from checkpointless.faults.ledger import FaultLedger
from checkpointless.faults.spec import SETUP_PHASES, FaultKind, FaultPhase, FaultSpec, FaultSpecError, parse_all
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import EventLog
from checkpointless.observability.telemetry.scribe import flush_all
from checkpointless.system.environment import AGENT_PID_ENV, FAULTS_ENV, own_run_dir
from checkpointless.system.signals import CUT_SIGNAL

_NOTICED_S = 10.0  # by then the job has noticed what was done to the agent
_TURN_S = 0.02  # short, so that this thread can be interrupted
_NO_HOST_HAS_BYTES = 1 << 62  # more than the address space holds, so that the kernel refuses at once
logger = logging.getLogger(__name__)
INJECTED_EXIT_CODE = 17
_HANG_S = 3600.0


# --- Faults of a node, which a rank causes through its agent ------------------------------------------------------


def _lose(agent: int) -> None:
    os.kill(agent, signal.SIGKILL)
    time.sleep(_HANG_S)


def _cut_off(agent: int, seconds: float) -> None:
    """Stop the agent as if the network were gone; what wakes it up outlives this process, which may be killed."""
    subprocess.Popen(
        ["/bin/sh", "-c", 'sleep "$0"; kill -CONT "$1"', f"{seconds:g}", str(agent)],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.kill(agent, signal.SIGSTOP)


def _drop_coordinator(agent: int) -> None:
    """Make the agent close its connection to the coordinator, and wait for what follows."""
    os.kill(agent, CUT_SIGNAL)
    until_s = time.monotonic() + _NOTICED_S
    while time.monotonic() < until_s:
        time.sleep(_TURN_S)


class InjectedFault(RuntimeError):
    """Raised by a fault of kind ``exception``, and in a data-loader worker by one of kind ``dataloader``."""


class FaultInjector:
    """Causes the faults of one rank when they are due; ``of_job``: those that the job was launched with."""

    def __init__(self, specs: Sequence[FaultSpec], rank: int, ledger: FaultLedger, *, of_job: bool = False) -> None:
        # Set by who knows them: what returns the tensor of this rank's state that is damaged, and torch's iterator
        # over its training data (None: without workers).
        self.target: Callable[[], Any] | None = None
        self.batches: Callable[[], Any] | None = None
        self.rank = rank
        self.ledger = ledger
        self.of_job = of_job
        self._by_phase: dict[FaultPhase, list[tuple[int, FaultSpec]]] = {}
        for index, spec in enumerate(specs):
            if spec.rank in (None, rank):
                self._by_phase.setdefault(spec.phase, []).append((index, spec))

    @classmethod
    def from_environment(cls, rank: int) -> FaultInjector | None:
        """Return the injector of ``CHECKPOINTLESS_FAULTS`` (a JSON list of specs); None if it asks for nothing."""
        value = os.environ.get(FAULTS_ENV) or "[]"
        try:
            texts = json.loads(value)
        except ValueError:
            texts = None
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise FaultSpecError(f"{FAULTS_ENV} must be a JSON list of fault specs, not {value!r}")
        specs = parse_all(texts, world_size=None, max_steps=None)
        return cls(specs, rank, FaultLedger(own_run_dir()), of_job=True) if specs else None

    def at(self, phase: FaultPhase, step: int, generation: int, target: Callable[[], Any] | None = None) -> None:
        """Cause the faults that are due; in generation 0, set-up phases cause none. ``target`` gives a tensor."""
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
        """Count the fault and cause it, if it is due. If another rank's fault comes before, it does not count."""
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
        EventLog.here().emit(
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
        """Return the function that causes the fault, if it can be caused here."""
        text = spec.text or str(spec)
        if spec.kind is FaultKind.EXCEPTION:
            return lambda: _raise(InjectedFault(f"injected fault {text}"))
        if spec.kind is FaultKind.SLOW:
            return lambda: time.sleep(spec.duration_s)
        if spec.kind is FaultKind.OOM:
            if "torch" not in sys.modules:
                raise _impossible(text, "this process has not imported torch, so torch cannot run out of memory")
            return lambda: _must_raise(_run_out_of_memory, text)
        if spec.kind is FaultKind.CUDA:
            if not _has_cuda():
                raise _impossible(text, "it needs ranks on GPUs, and CUDA is not available here")
            return lambda: _must_raise(_fail_device_assert, text)
        if spec.kind is FaultKind.DATALOADER:
            batches = self.batches() if self.batches is not None else None
            if batches is None:
                raise _impossible(text, "the data loader of this rank has no workers (num_workers=0)")
            if spec.how == "kill":
                return lambda: _must_raise(lambda: _kill_worker(batches), text)
            error = InjectedFault(f"injected fault {text}")
            return lambda: _must_raise(lambda: _raise_in_worker(batches, error), text)
        if spec.kind.is_of_node:
            pid = os.environ.get(AGENT_PID_ENV)
            if pid is None:
                raise _impossible(text, "a node can only be lost in a job of several nodes")
            agent = int(pid)
            if spec.kind is FaultKind.PARTITION:
                return lambda: _cut_off(agent, spec.duration_s)
            return lambda: (_lose if spec.kind is FaultKind.NODE else _drop_coordinator)(agent)
        if spec.kind is FaultKind.BITFLIP:
            if target is None:
                raise _impossible(text, "the strategy does not say where this rank's state is")
            return lambda: _flip_a_bit(target())
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


# --- Damage to tensors --------------------------------------------------------------------------------------------
#
# This room does not import torch, which a process that trains has imported: it is looked up, and tensors are Any.


def _flip_a_bit(tensor: Any) -> None:  # Any: a tensor, of a package that this room does not import
    """Flip the lowest bit of the byte in the middle of a tensor that is contiguous and not empty."""
    flat = tensor.detach().reshape(-1).view(_torch().uint8)
    flat[flat.numel() // 2] ^= 1


# --- Faults of memory and of the GPU ------------------------------------------------------------------------------


def _has_cuda() -> bool:
    return "torch" in sys.modules and bool(_torch().cuda.is_available())


def _run_out_of_memory() -> None:
    """Request more memory than exists, in one piece, which is refused: of the GPU if CUDA is in use."""
    torch = _torch()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        device = torch.device("cuda", torch.cuda.current_device())
        nbytes = 2 * torch.cuda.get_device_properties(device).total_memory
    else:
        device, nbytes = torch.device("cpu"), _NO_HOST_HAS_BYTES
    torch.empty(nbytes, dtype=torch.uint8, device=device)


def _fail_device_assert() -> None:
    """Make a kernel read outside a tensor on the current GPU: this process's CUDA context is lost then."""
    torch = _torch()
    outside = torch.ones(1, dtype=torch.int64, device="cuda")
    torch.zeros(1, device="cuda")[outside]
    torch.cuda.synchronize()


def _torch() -> Any:
    return sys.modules["torch"]


# --- Faults in the workers of a torch data loader, as torch reports them to the training process ------------------
#
# Batches that the workers have prefetched are used up, so that the fault shows at the batch for which it was
# requested. An iterator that has failed is of no use afterwards anyway.


class WorkersIterator(Protocol):
    """Torch's iterator over a ``DataLoader`` with workers (``_MultiProcessingDataLoaderIter``)."""

    _sampler_iter: Iterator[object]
    _workers: Sequence[Any]  # Any: processes

    def __iter__(self) -> Iterator[object]:
        """Return the iterator itself."""


class _BadBatch:
    """Stand-in for the indices of a batch that a sampler yields, which no dataset can read."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def _refuse(self, *_: Any) -> Any:
        raise self._error

    __getitem__ = __index__ = __iter__ = __len__ = _refuse


def _raise_in_worker(iterator: WorkersIterator, error: Exception) -> None:
    """Make a worker raise while it reads a batch; torch raises the same type, which must take a message alone."""
    iterator._sampler_iter = itertools.repeat(_BadBatch(error))
    _use_up(iterator)


def _kill_worker(iterator: WorkersIterator) -> None:
    """Kill a worker with SIGKILL; torch raises when it finds it dead."""
    worker = next(each for each in iterator._workers if each.is_alive())
    os.kill(worker.pid, signal.SIGKILL)
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)  # torch's SIGCHLD handler asks how it ended
    _use_up(iterator)


def _use_up(iterator: WorkersIterator) -> None:
    for _ in iterator:
        pass
