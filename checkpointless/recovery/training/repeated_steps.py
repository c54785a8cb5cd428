"""Whether a step that is made again takes the data that it took before the fault.

A loop of one's own has to take the batches of a step by its number. A loader that it goes through over several
steps begins anew after a fault, and nothing else would notice. What a step takes from loaders is therefore noted in
few bytes, and compared where the step is made again.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import xxhash
from torch.utils.data import dataloader

from checkpointless.inprocess import active_call_wrapper
from checkpointless.inprocess.context import tell
from checkpointless.patches import Patch, Patches
from checkpointless.serialization.tensor_memory import tensor_bytes
from checkpointless.telemetry.event_names import EventName

_BYTES = 4096  # of each tensor
_DEEPEST = 4  # containers within containers
_OTHER_BATCHES = (
    "step %d is made again after the fault and takes another batch from its DataLoader than before: what follows "
    "is not what an undisturbed run computes. A loader that is gone through over several steps begins anew: let"
    " its sampler begin where the step says, or take the batches of a step by its number"
)
_OTHER_LOSS = (
    "step %d is made again after the fault and has the loss %r, where it had %r before: unless kernels are not "
    "deterministic, what follows is not what an undisturbed run computes. Batches have to follow from the step's "
    "number, and what the loop keeps for itself is not brought back"
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


class RepeatedSteps:
    """What the newest step of this process took and computed, also in the generation before.

    One of a process is enough, since a block runs once at a time: :data:`repeated_steps`.

    Attributes:
        passes: which loaders gave the batches.
    """

    def __init__(self) -> None:
        self._step = 0
        self._taken: list[str] = []  # a digest of each batch
        self._loss: float | None = None
        self._before: tuple[int, list[str], float | None] = (0, [], None)
        self._is_told = False
        self._listeners = 0
        self.passes = LoaderPasses()

    def begin_entry(self) -> None:
        """Note that the block was entered: what was noted until now was before the fault."""
        if self._step > 0:
            self._before = self._step, self._taken, self._loss
        self._step, self._taken, self._loss, self._is_told = 0, [], None, False
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
        self._taken.append(digest_batch(batch))

    def batch_of(self, step: int) -> str | None:
        """Return the digest of the last batch that ``step`` took from a loader; None if it took none."""
        return self._taken[-1] if self._step == step and self._taken else None

    def compute(self, step: int, loss: float | None) -> None:
        """Note the loss of ``step``, whose gradients are final; compare it, and what the step has taken.

        A loop may go past the batches of earlier steps first, and the fault may have come before the last batch:
        what was taken before the fault has to be, in one piece, among what is taken now.
        """
        self._begin(step)
        self._loss = loss
        at, taken, before = self._before
        if at == step and not _has_piece(self._taken, taken):
            self._tell(_OTHER_BATCHES, step)
        if at == step and loss is not None and before is not None and float(loss).hex() != float(before).hex():
            tell(EventName.INEXACT, step=step, loss=loss, before=before)
            self._tell(_OTHER_LOSS, step, loss, before)

    def _begin(self, step: int) -> None:
        if step != self._step:
            self._step, self._taken, self._loss = step, [], None

    def _tell(self, message: str, *values: object) -> None:
        if not self._is_told:
            self._is_told = True
            logger.error(message, *values)


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
    """Return the digest of a batch: of its shapes, and of the first bytes of each tensor on the CPU."""
    digest = xxhash.xxh3_64()
    for tensor in _tensors_in(batch):
        digest.update(str(tuple(tensor.shape)).encode())
        if tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.numel():
            digest.update(tensor_bytes(tensor.detach().reshape(-1)[: _BYTES // tensor.element_size()]).numpy().data)
    return digest.hexdigest()


def _tensors_in(value: object, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < _DEEPEST and isinstance(value, (dict, list, tuple)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(each, depth + 1)
