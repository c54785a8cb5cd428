"""Whether a step that is repeated is the one that it was before the fault.

A loop of one's own has to take the batches of a step by its number. A loader that it goes through over several
steps starts over after a fault, and nothing else would notice. What a step takes and computes is therefore noted in
few bytes, and compared where the step is repeated.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch.utils.data import dataloader

from checkpointless.inprocess import active_call_wrapper
from checkpointless.inprocess.context import not_exact
from checkpointless.observability.telemetry.steps import StepLog, exact_loss
from checkpointless.state.serialization.tensor_memory import tensor_bytes
from checkpointless.system.patches import Patch, Patches

_BYTES = 4096  # of each tensor
_DEEPEST = 4  # containers within containers
_STEPS = 1024  # a recovery from a copy or from storage goes back by so many at most
_HINT = (
    "%s: unless kernels are not deterministic, what follows is not what an undisturbed run computes. Batches have "
    "to follow from the step's number: a loader that is gone through over several steps begins anew, so let its "
    "sampler begin where the step says. What a loop keeps for itself has to be declared"
)
_WHY = "a step that is made again is to take the batches that it took before the fault"
_patches = Patches()
logger = logging.getLogger(__name__)


class LoaderPasses:
    """Which of torch's loaders gave batches since the last step, to see where epochs and validations are.

    An iterator is known by its number (``id``), which a later one may have again.
    """

    def __init__(self) -> None:
        self._epoch = 0
        self._gave: list[int] = []
        self._ended: list[int] = []
        self._used: int | None = None

    def gave(self, iterator: int) -> None:
        """Note that an iterator gave a batch."""
        if not self._gave or self._gave[-1] != iterator:
            self._gave.append(iterator)

    def ended(self, iterator: int) -> None:
        """Note that an iterator had no more batches."""
        self._ended.append(iterator)

    def look(self) -> tuple[int, bool]:
        """Look back when a step was made, whose batch came last.

        Returns:
            A number that changes with the epoch, and whether another loader gave batches since the step before.
        """
        used = self._gave[-1] if self._gave else self._used
        if self._used is not None and (used != self._used or used in self._ended):
            self._epoch += 1
        others = {*self._gave} - {used, self._used}
        was_validated = bool(others) or len(self._ended) > 1 or (used == self._used and len(self._gave) > 1)
        self._gave, self._ended, self._used = [], [], used
        return self._epoch, was_validated


@dataclass
class _Made:
    """What is known of a step from before a fault.

    Attributes:
        taken: for each time that the step was begun, a digest of each batch that it took.
        loss: its loss (None: not known).
    """

    taken: list[list[str]] = field(default_factory=list)
    loss: float | None = None


class RepeatedSteps:
    """What steps took and computed, so that those that are repeated can be compared.

    One of a process is enough, since a block runs once at a time: :data:`repeated_steps`. A step is compared with
    what it was at first, however many faults have come since.

    Attributes:
        passes: which loaders gave the batches.
    """

    def __init__(self) -> None:
        self._step = 0
        self._taken: list[str] = []  # a digest of each batch
        self._arrived = ""  # a digest of the batch that is about to be used
        self._loss: float | None = None
        self._is_computed = False  # what is taken from then on is none of the step's
        self._before: dict[int, _Made] = {}  # by step; those of this entry are among them once they are over
        self._is_first = True
        self._is_told = False
        self._listeners = 0
        self.passes = LoaderPasses()

    def begin_entry(self, is_first: bool) -> None:
        """Note that the block was entered: what was noted until now was before the fault.

        Args:
            is_first: whether nothing comes before this entry: there was another block, or the job begins again.
        """
        self._is_first = is_first
        if is_first:
            self._before = {}
        else:
            self._end_step()
        self._step, self._arrived, self._is_told = 0, "", False
        self.passes = LoaderPasses()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note, once, what loaders give in the context; a loop that a fault has ended may be in its own still."""
        if not _patches.are_made:
            base = dataloader._BaseDataLoaderIter
            _patches.make([Patch(base, "__next__", _listening, _WHY)])
        self._listeners += 1
        try:
            yield
        finally:
            self._listeners -= 1
            if self._listeners == 0:
                _patches.undo()

    def take(self, step: int, batch: object) -> None:
        """Note a batch that ``step`` takes from a loader."""
        self._begin(step)
        if not self._is_computed:
            self._taken.append(digest_batch(batch))

    def batch_of(self, step: int) -> str | None:
        """Return the digest of the last batch that ``step`` took from a loader; None if it took none."""
        return (self._taken[-1] or None) if self._step == step and self._taken else None

    def arrive(self, batch: object) -> None:
        """Note a batch that may be left out; see :meth:`use`."""
        self._arrived = digest_batch(batch)

    def use(self, step: int) -> None:
        """Note that ``step`` takes the batch that has arrived, if it has not done so yet."""
        if self._arrived:
            self._begin(step)
            self._taken.append(self._arrived)
            self._arrived = ""

    def compute(self, step: int, loss: float | None) -> None:
        """Note the loss of ``step``, whose gradients are final; compare it, and what the step has taken.

        A loop may go past the batches of earlier steps first, and the fault may have come before the last batch:
        what was taken before the fault has to be, in one piece, among what is taken now.

        Raises:
            UnrecoverableError: the step is another one, and the job is to end then (``--strict``).
        """
        call = active_call_wrapper()
        if call is not None:
            call.leave_if_over()  # a loss that aborted collectives have left says nothing
        self._begin(step)
        self._loss, self._is_computed = loss, True
        before = self._before.get(step)
        if before is None:
            return
        others: list[str] = []
        facts: dict[str, float] = {}
        if not all(_has_piece(self._taken, each) for each in before.taken):
            others.append("takes another batch than before the fault")
        if loss is not None and before.loss is not None and float(loss).hex() != float(before.loss).hex():
            others.append(f"has the loss {loss!r}, where it had {before.loss!r} before")
            facts = {"loss": loss, "before": before.loss}
        if others:
            self._tell(step, " and ".join(others), **facts)

    def record(self, log: StepLog, step: int, loss: float | None, params: str, *more: Any) -> None:
        """Record a step with ``log``, and compare it with what was recorded of it before a fault.

        Args:
            log: the log of recorded steps.
            step: the step, which is committed.
            loss: its loss on this rank; None if it is not known.
            params: the digest of this rank's parameters after it.
            *more: what :meth:`~checkpointless.observability.telemetry.steps.StepLog.record` takes besides.

        Raises:
            UnrecoverableError: the step is another one, and the job is to end then (``--strict``).
        """
        before = None if self._is_first else log.earlier(step)
        log.record(step, loss, params, *more)
        if before is None:
            return
        is_other = before.loss != exact_loss(loss) and exact_loss(None) not in (before.loss, exact_loss(loss))
        if is_other or before.params != params:
            what = "another loss" if is_other else "other parameters"
            self._tell(step, f"ends with {what} than before the fault")

    def _begin(self, step: int) -> None:
        if step != self._step:
            self._end_step()
            self._step, self._taken, self._loss, self._is_computed = step, [], None, False

    def _end_step(self) -> None:
        if self._step <= 0:
            return
        made = self._before.setdefault(self._step, _Made())
        if self._taken not in made.taken:
            made.taken.append(self._taken)
        if made.loss is None:
            made.loss = self._loss
        while len(self._before) > _STEPS:
            del self._before[min(self._before)]

    def _tell(self, step: int, what: str, **facts: float) -> None:
        if not self._is_told:
            self._is_told = True
            logger.error(_HINT, f"step {step} {what}")
            not_exact(step, f"step {step} {what}", **facts)


repeated_steps = RepeatedSteps()


def _listening(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def __next__(iterator: Any) -> Any:
        try:
            batch = original(iterator)
        except StopIteration:
            repeated_steps.passes.ended(id(iterator))
            raise
        call = active_call_wrapper()
        if call is not None and call.steps.making > 0 and _patches.are_made:
            repeated_steps.take(call.steps.making, batch)
            repeated_steps.passes.gave(id(iterator))
        return batch

    return __next__


def _has_piece(items: list[str], piece: list[str]) -> bool:
    size = len(piece)
    return any(items[start : start + size] == piece for start in range(len(items) - size + 1))


def digest_batch(batch: object) -> str:
    """Return the digest of a batch, of its shapes and first bytes of tensors on the CPU; "" without tensors."""
    digest, tensors = xxhash.xxh3_64(), list(_tensors_in(batch))
    for tensor in tensors:
        digest.update(str(tuple(tensor.shape)).encode())
        if tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.numel():
            digest.update(tensor_bytes(tensor.detach().reshape(-1)[: _BYTES // tensor.element_size()]).numpy().data)
    return digest.hexdigest() if tensors else ""


def _tensors_in(value: object, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < _DEEPEST and isinstance(value, (dict, list, tuple)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(each, depth + 1)
