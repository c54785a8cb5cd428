"""Where the data go on after a checkpoint on storage was loaded, which may hold nothing of that."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from checkpointless.inprocess.context import not_exact
from checkpointless.inprocess.facts import Facts
from checkpointless.strategies.data.position import keeps_its_position, megatron_sampler, samples_per_step

_BEGAN = "where the data began"  # the fact: the step and the samples that the fit began at


class StoredPosition:
    """The position in the data of a fit that resumes from storage after a fault.

    NeMo keeps the position in the data module's ``state_dict``, and Lightning in that of a loader. Where there is
    none, the data would begin anew without a word.

    Args:
        trainer: the trainer.
        facts: the facts of this rank.
    """

    def __init__(self, trainer: pl.Trainer, facts: Facts) -> None:
        self._trainer, self._facts = trainer, facts
        self._step = 0  # the step that the fit resumes after, if the position in its epoch is not known yet

    def begin(self, step: int) -> None:
        """Note where the data of a fit begin that begins after ``step``, with what the script has loaded."""
        sampler = megatron_sampler(self._trainer)
        self._facts.keep(_BEGAN, [step, int(sampler.init_consumed_samples) if sampler is not None else None])

    def resume(self, step: int) -> None:
        """Bring NeMo's sampler to where it stood after ``step``, unless the data module has done that.

        Raises:
            UnrecoverableError: the data begin anew, and the job is to end then (``--strict``).
        """
        trainer: Any = self._trainer
        sampler = megatron_sampler(trainer)
        began_step, began_samples = self._facts.get(_BEGAN, [step, None])
        if step <= began_step:
            return
        if sampler is None:
            progress = trainer.fit_loop.epoch_loop.batch_progress
            self._step = step if progress.current.ready and not progress.is_last_batch else 0
            return
        if sampler.init_consumed_samples != began_samples:
            return  # the data module has a state_dict
        size = samples_per_step(trainer)
        if size is None or trainer.current_epoch:
            self._begins_anew(step, "the data module has no state_dict")
            return
        sampler.init_consumed_samples = sampler.prev_consumed_samples = began_samples + (step - began_step) * size
        sampler.if_first_step = 1  # as NeMo's data modules set it
        sampler.init_global_step = trainer.global_step

    def made(self, loader: object) -> None:
        """Look at the training loader that was made for the epoch in which the fit resumes.

        Raises:
            UnrecoverableError: its batches begin anew, and the job is to end then (``--strict``).
        """
        step, self._step = self._step, 0
        if step and not keeps_its_position(loader):
            self._begins_anew(step, "the loader has no state_dict")

    def _begins_anew(self, step: int, why: str) -> None:
        reason = f"the data begin anew after step {step}: the checkpoint does not hold their position, as {why}"
        not_exact(step + 1, reason)
