"""Lets loggers that are made anew after a fault continue in the same folder, after the same rows."""

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
