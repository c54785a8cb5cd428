"""Keeps, as facts that outlive every process, where the loggers of rank 0 write and how far they have come."""

from __future__ import annotations

import os

import lightning.pytorch as pl

from checkpointless.inprocess.facts import Facts
from checkpointless.strategies.frameworks.loggers import forget_rows, rows_of, versions_of, write_on

_NEMO_VERSION = "NEMO_EXPM_VERSION"  # nemo.constants.NEMO_ENV_VARNAME_VERSION
_ROWS = "rows"  # the fact that records how many rows the loggers had when the newest validation began


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

    def keep_rows(self, step: int) -> None:
        """Keep how many rows there are when the validation after ``step`` begins."""
        if self._trainer.is_global_zero:
            self._facts.keep(_ROWS, [step, rows_of(self._trainer)])

    def forget_rows(self, first: int, validated_after: int | None) -> None:
        """Drop the rows that are about to be logged again.

        Args:
            first: the step from which on rows are dropped.
            validated_after: the step whose validation comes next: rows from before it stay. None: no validation.
        """
        if self._trainer.is_global_zero:
            step, rows = self._facts.get(_ROWS, [-1, []])
            kept = rows if validated_after is not None and step == validated_after else []
            forget_rows(self._trainer, first, kept)
