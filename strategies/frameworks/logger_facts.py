"""Keeps, as facts that outlive every process, where the loggers of rank 0 write and how far they have come."""

from __future__ import annotations

import os

import lightning.pytorch as pl

from checkpointless.inprocess.facts import Facts
from checkpointless.strategies.frameworks.loggers import forget_rows, rows_of, versions_of, write_on

_NEMO_VERSION = "NEMO_EXPM_VERSION"  # nemo.constants.NEMO_ENV_VARNAME_VERSION
_ROWS = "rows"  # the fact that records how many rows the loggers had before validations and ends of epochs


class LoggerFacts:
    """What the loggers of a trainer leave to those of its successor. Ranks other than 0 do nothing.

    Args:
        trainer: the trainer.
        facts: the facts of this rank.
    """

    def __init__(self, trainer: pl.Trainer, facts: Facts) -> None:
        self._trainer = trainer
        self._facts = facts

    def write_on(self, fit: int) -> None:
        """Make new loggers continue where those of the same fit were. Call this before they have written anything.

        Args:
            fit: the number of the fit in the block, from 1.
        """
        if self._trainer.is_global_zero:
            write_on(self._trainer, self._facts.get(f"loggers of fit {fit}", []))

    def keep(self, fit: int) -> None:
        """Keep where loggers write and the folder name that NeMo has made up, so that they outlive rank 0.

        Args:
            fit: the number of the fit in the block, from 1.
        """
        if self._trainer.is_global_zero:
            self._facts.keep(f"loggers of fit {fit}", versions_of(self._trainer))
            name = _NEMO_VERSION
            if name in os.environ:
                self._facts.keep("environment", {name: os.environ[name]})

    def keep_rows(self, step: int, stage: int) -> None:
        """Keep how many rows there are at a moment after which rows of its own step or before may be logged.

        Args:
            step: the optimizer step.
            stage: the moment after it.
        """
        if self._trainer.is_global_zero:
            others = [each for each in self._facts.get(_ROWS, []) if each[0] == step and each[1] != stage]
            self._facts.keep(_ROWS, [*others, [step, stage, rows_of(self._trainer)]])

    def forget_rows(self, first: int, step: int, stage: int) -> None:
        """Drop the rows that are about to be logged again.

        Args:
            first: the step from which on rows are dropped, if the number of rows at the moment was not kept.
            step: the optimizer step that training resumes after.
            stage: the moment after it that training resumes at.
        """
        if self._trainer.is_global_zero:
            known = {(at, moment): rows for at, moment, rows in self._facts.get(_ROWS, [])}
            forget_rows(self._trainer, first, known.get((step, stage)))
