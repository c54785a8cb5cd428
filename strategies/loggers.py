"""Loggers that are made anew after a fault write on where they were: in the same folder, behind the same rows."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger

logger = logging.getLogger(__name__)


def versions_of(trainer: pl.Trainer) -> list[int | str | None]:
    """The version of each logger of ``trainer`` that numbers its folders; None for others."""
    return [getattr(each, "_version", None) for each in trainer.loggers]


def write_on(trainer: pl.Trainer, versions: Sequence[int | str | None]) -> None:
    """Have the loggers go on with ``versions``. Before anything asks them for their folder.

    Args:
        trainer: of rank 0, with loggers that have written nothing yet.
        versions: what :func:`versions_of` gave before the fault.
    """
    for each, version in zip(trainer.loggers, versions):
        if version is None or not hasattr(each, "_version"):
            continue
        each._version = version
        if isinstance(each, CSVLogger):
            _keep_rows(each)


def forget_rows(trainer: pl.Trainer, first: int) -> None:
    """Drop the rows of a :class:`CSVLogger` from ``first`` on: what they say is about to be logged again."""
    for each in trainer.loggers:
        if isinstance(each, CSVLogger):
            path = Path(each.experiment.metrics_file_path)
            if path.exists():
                _write(path, [row for row in _read(path) if float(row["step"] or 0) < first])


def _keep_rows(each: CSVLogger) -> None:
    """Lightning deletes the rows of a version when it is opened again."""
    path = Path(each.log_dir) / "metrics.csv"
    if not path.exists():
        return
    rows = _read(path)
    path.rename(path.with_suffix(".before"))  # so that it is not deleted, nor warned of
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
