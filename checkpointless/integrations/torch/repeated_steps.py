"""Whether a step that is repeated is the one that it was before the fault.

A loop has to take a step's batches by its number: a loader that it goes through over several steps would start over
unnoticed. So what a step takes and computes is noted in few bytes, and compared where it is repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from checkpointless.inprocess import active_call_wrapper
from checkpointless.inprocess.wrap import not_exact
from checkpointless.observability.telemetry.steps import StepLog
from checkpointless.state.serialization.tensor_memory import tensor_bytes

_BYTES = 4096  # of each tensor
_DEEPEST = 4  # containers within containers
_STEPS = 1024  # a recovery from a copy or from storage goes back by so many at most
_Parts = list[tuple[str, torch.Tensor | None]]
_BATCHES = 64  # of a step; a cell may be called for each element of a sequence
_HINT = (
    "%s: unless kernels are not deterministic, what follows is not what an undisturbed run computes. Batches have "
    "to follow from the step's number: a loader that is gone through over several steps begins anew, so let its "
    "sampler begin where the step says. What a loop keeps for itself has to be declared"
)
logger = logging.getLogger(__name__)


@dataclass
class _Step:
    """What is known of a step: the batches that it took before it was computed, and its loss."""

    batches: list[_Parts] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    loss: float | None = None
    is_computed: bool = False

    def taken(self) -> list[str]:
        self.digests += map(_digest, self.batches)
        self.batches = []
        return self.digests


class _RepeatedSteps:
    """What steps took and computed at first, one per process (:data:`repeated_steps`), to compare repeated ones."""

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}  # of this entry
        self._before: dict[int, _Step] = {}  # of those before a fault
        self._is_first = True
        self._is_told = False
        self._hooks: list[RemovableHandle] = []
        self._is_paused = False
        self.was_validated = False

    def begin_entry(self, is_first: bool) -> None:
        """Note that the block was entered; ``is_first``: nothing that was noted precedes it."""
        for number, step in self._steps.items():
            known = self._before.get(number)
            if known is None or (not known.is_computed and len(step.taken()) >= len(known.taken())):
                self._before[number] = step
        self._before = {} if is_first else dict(sorted(self._before.items())[-_STEPS:])
        self._steps, self._is_first = {}, is_first
        self._is_told = self.was_validated = False

    @contextmanager
    def listening(self, modules: Iterable[torch.nn.Module]) -> Iterator[None]:
        """Note what modules are called with meanwhile: with gradients it is the step's, else a validation's."""
        for hook in self._hooks:
            hook.remove()
        inner = [each.module if isinstance(each, DistributedDataParallel) else each for each in modules]
        hooks = self._hooks = [each.register_forward_pre_hook(_NotesInputs(), with_kwargs=True) for each in inner]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take nothing in the context: what is computed there was computed before in the same step."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def take(self, step: int, batch: object) -> None:
        """Note a batch that ``step`` takes; what is taken once it is computed is none of its batches."""
        noted = self._steps.setdefault(step, _Step())
        if not (noted.is_computed or self._is_paused) and len(noted.batches) < _BATCHES:
            noted.batches.append(_parts_of(batch))

    def batch_of(self, step: int) -> str | None:
        """Return the digest of the last batch that ``step`` took; None if it took none."""
        taken = self._steps.get(step, _Step()).taken()
        return (taken[-1] or None) if taken else None

    def compute(self, step: int, loss: float | None) -> None:
        """Note the loss of ``step``; compare it and the batches, of which the fault may have cut some off."""
        call = active_call_wrapper()
        if call is not None:
            call.leave_if_over()  # a loss that aborted collectives have left says nothing
        noted = self._steps.setdefault(step, _Step())
        noted.loss, noted.is_computed, taken = loss, True, noted.taken()
        self._steps.pop(step - _STEPS, None)
        before = self._before.get(step)
        if before is None:
            return
        others: list[str] = []
        facts: dict[str, float] = {}
        if taken[: len(before.taken())] != before.taken():
            others.append("takes another batch than before the fault")
        if loss is not None and before.loss is not None and float(loss).hex() != float(before.loss).hex():
            others.append(f"has the loss {loss!r}, where it had {before.loss!r} before")
            facts = {"loss": loss, "before": before.loss}
        if others:
            self._tell(step, " and ".join(others), **facts)

    def record(self, log: StepLog, step: int, loss: float | None, params: str, **more: Any) -> None:
        """Record a committed step with ``log``, and compare its parameters with those recorded before a fault."""
        before = None if self._is_first else log.earlier(step)
        log.record(step, loss, params, **more)
        if before is not None and before.params != params:
            self._tell(step, "ends with other parameters than before the fault")

    def _tell(self, step: int, what: str, **facts: float) -> None:
        """Tell, once, that a step is another one; if the job is to end then (``--strict``), raise."""
        if not self._is_told:
            self._is_told = True
            logger.error(_HINT, f"step {step} {what}")
            not_exact(step, f"step {step} {what}", **facts)


repeated_steps = _RepeatedSteps()


class _NotesInputs:
    """Notes what a trained module is called with; in a copy, or one saved as a whole, does nothing."""

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the inputs of a step; what was computed from parameters belongs to none of its batches."""
        if torch.compiler.is_compiling():
            return
        call, has_gradients = active_call_wrapper(), torch.is_grad_enabled()
        if not (has_gradients and module.training):
            repeated_steps.was_validated = True
        if has_gradients and call is not None and call.steps.making > 0:
            call.pace.computes()
            given = [each for each in _tensors_in([args, kwargs]) if each.grad_fn is None]
            repeated_steps.take(call.steps.making, given)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what does nothing, and is found where this package is not installed."""
        return getattr, (nullcontext(), "__exit__")


def digest_batch(batch: object) -> str:
    """Return the digest of a batch: of the shapes and first bytes of its tensors; "" without tensors."""
    return _digest(_parts_of(batch))


def _parts_of(batch: object) -> _Parts:
    """Return the shape of each tensor and a copy of its first elements, without waiting for a device."""
    return [(str(tuple(each.shape)), _first_of(each)) for each in _tensors_in(batch)]


def _digest(parts: _Parts) -> str:
    digest = xxhash.xxh3_64()
    for shape, first in parts:
        digest.update(shape.encode())
        if first is not None:
            digest.update(tensor_bytes(first.cpu()).numpy().data)
    return digest.hexdigest() if parts else ""


def _first_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of the first elements; None: there are none, or they cannot be read now."""
    is_captured = tensor.is_cuda and torch.cuda.is_current_stream_capturing()
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or not tensor.numel() or is_captured:
        return None
    first = tensor.detach() if tensor.is_contiguous() else tensor.detach()[:1]  # not all of it is copied
    first = first.reshape(-1)[: _BYTES // tensor.element_size()].resolve_conj().resolve_neg().clone()
    try:
        first.data_ptr()
    except RuntimeError:  # within torch.func, whose tensors have no memory
        return None
    return first


def _tensors_in(value: object, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < _DEEPEST and isinstance(value, (dict, list, tuple)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(each, depth + 1)
