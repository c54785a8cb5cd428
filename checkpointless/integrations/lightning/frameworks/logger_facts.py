"""Keeps, as facts that outlive every process, where the loggers of rank 0 write and how far they have come."""

from __future__ import annotations

import csv
import io
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger

from checkpointless.inprocess.facts import Facts

logger = logging.getLogger(__name__)
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


# --- Loggers continue in the same folder, after the same rows -----------------------------------------------------


def versions_of(trainer: pl.Trainer) -> list[int | str | None]:
    """Return the version of each logger of ``trainer`` that numbers its folders, and None for each other logger."""
    return [getattr(each, "_version", None) for each in trainer.loggers]


def write_on(trainer: pl.Trainer, versions: Sequence[int | str | None]) -> None:
    """Make the loggers continue with ``versions``. Call this before anything asks them for their folder.

    Args:
        trainer: the trainer of rank 0, whose loggers have written nothing yet.
        versions: what :func:`versions_of` returned before the fault.
    """
    for each, version in zip(trainer.loggers, versions):
        if version is None or not hasattr(each, "_version"):
            continue
        each._version = version
        if isinstance(each, CSVLogger):
            _keep_rows(each)


def rows_of(trainer: pl.Trainer) -> list[int]:
    """Return how many rows each :class:`CSVLogger` of ``trainer`` has, including those not written yet."""
    found = []
    for each in trainer.loggers:
        if isinstance(each, CSVLogger):
            path = Path(each.experiment.metrics_file_path)
            lines = path.read_bytes().count(b"\n") if path.exists() else 0
            found.append(max(0, lines - 1) + len(each.experiment.metrics))
    return found


def forget_rows(trainer: pl.Trainer, first: int, kept: Sequence[int] | None = None) -> None:
    """Drop the rows of each :class:`CSVLogger` that are about to be logged again.

    Args:
        trainer: the trainer of rank 0.
        first: the step from which on rows are dropped, as Lightning counts rows (``_batches_that_stepped``).
        kept: how many rows of each logger are kept, as :func:`rows_of` returned it; None: those before ``first``,
            and before ``trainer.global_step`` where a logged value of the name ``step`` counts rows, as NeMo's
            does. The two differ by one if the training was begun from a checkpoint that was saved within an epoch.
    """
    loggers = [each for each in trainer.loggers if isinstance(each, CSVLogger)]
    for index, each in enumerate(loggers):
        path = Path(each.experiment.metrics_file_path)
        if path.exists():
            rows = _read(path)
            if kept is not None and index < len(kept):
                rows = rows[: kept[index]]
            else:
                rows = [row for row in rows if _is_before(row["step"], first, trainer.global_step)]
            _write(path, rows)


def _is_before(step: str, first: int, global_step: int) -> bool:
    """Return whether a row is kept; a ``step`` that was logged is a float, Lightning's own an integer."""
    return float(step or 0) < (global_step if "." in step else first)


def _keep_rows(each: CSVLogger) -> None:
    """Keep the rows of a version, which Lightning would delete when it opens the version again."""
    path = Path(each.log_dir) / "metrics.csv"
    if not path.exists():
        return
    rows = _read(path)
    path.rename(path.with_suffix(".before"))  # so that Lightning neither deletes it nor warns of it
    experiment = each.experiment
    path.with_suffix(".before").replace(path)
    experiment.metrics_keys = sorted(rows[0]) if rows else []


def _read(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text())))


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    if not rows:
        path.unlink()
        return
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    whole = path.with_suffix(".whole")
    whole.write_text(text.getvalue())
    whole.replace(path)
