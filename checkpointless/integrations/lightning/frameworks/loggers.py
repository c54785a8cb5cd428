"""Loggers over a restart: the frameworks' messages about their set-up, and where a trainer's loggers write."""

from __future__ import annotations

import csv
import logging
import os
import warnings
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger

from checkpointless.inprocess.finalize import register_cleanup
from checkpointless.launcher.protocol.board import Facts
from checkpointless.observability.telemetry.scribe import asked_for_level

#: The first component of the names of the loggers that are silenced.
FAMILIES = (
    "nemo",
    "nemo_logger",
    "megatron",
    "lightning",
    "lightning_fabric",
    "pytorch_lightning",
    "nv_one_logger",
)
_FOLDERS = tuple(f"{os.sep}{family}{os.sep}" for family in ("nemo", "megatron", "lightning"))
_UNTRUE = (
    "You're resuming from a checkpoint that ended before the epoch ended"  # the position in the data is restored
)
_NEMO_VERSION = "NEMO_EXPM_VERSION"  # nemo.constants.NEMO_ENV_VARNAME_VERSION

_levels: dict[str, int] = {}  # the previous levels of the loggers that are quiet now


def install() -> None:
    """Silence the frameworks from the end of each generation until training resumes in the next. Idempotent."""
    register_cleanup("chatter", quiet)


def quiet() -> None:
    """Let only the frameworks' warnings and errors through until :func:`speak`; with ``--log-level debug``, all."""
    if asked_for_level() == logging.DEBUG:
        return
    for name in FAMILIES:
        logging.getLogger(name)
    for name, each in list(logging.root.manager.loggerDict.items()):
        if not isinstance(each, logging.Logger) or name.partition(".")[0] not in FAMILIES:
            continue
        if each.level < logging.WARNING and (each.level != logging.NOTSET or name in FAMILIES):
            _levels.setdefault(name, each.level)
            each.setLevel(logging.WARNING)
    logging.getLogger().addFilter(_is_ours)  # it is added once, however often this runs
    warnings.filterwarnings("ignore", message=_UNTRUE)


def speak() -> None:
    """Let everything through again that was let through before :func:`quiet`."""
    while _levels:
        name, level = _levels.popitem()
        logging.getLogger(name).setLevel(level)
    logging.getLogger().removeFilter(_is_ours)


def _is_ours(record: logging.LogRecord) -> bool:
    """Return whether a message logged to the root logger itself is not one of the frameworks' set-up messages."""
    return record.levelno >= logging.WARNING or not any(folder in record.pathname for folder in _FOLDERS)


# --- A trainer's loggers write on in the folder of the ones before ------------------------------------------------


def keep_loggers(trainer: pl.Trainer, facts: Facts, fit: int) -> None:
    """Keep where rank 0's loggers write, and the folder name that NeMo has made up, so that they outlive it."""
    if trainer.is_global_zero:
        facts.keep(f"loggers of fit {fit}", [getattr(each, "_version", None) for each in trainer.loggers])
        if _NEMO_VERSION in os.environ:
            facts.keep("environment", {_NEMO_VERSION: os.environ[_NEMO_VERSION]})


def resume_loggers(trainer: pl.Trainer, facts: Facts, fit: int) -> None:
    """Make new loggers of rank 0 write where those of the same fit did, before they have written anything.

    Rows of steps that are redone are written once more (docs/contract.md, 4).
    """
    if not trainer.is_global_zero:
        return
    for each, version in zip(trainer.loggers, facts.get(f"loggers of fit {fit}", [])):
        if version is not None and hasattr(each, "_version"):
            each._version = version
            if isinstance(each, CSVLogger):
                _keep_rows(each)


def _keep_rows(each: CSVLogger) -> None:
    """Keep the rows of a version, which Lightning would delete when it opens the version again."""
    path = Path(each.log_dir) / "metrics.csv"
    if not path.exists():
        return
    with path.open(newline="") as file:
        names = next(csv.reader(file), [])
    path.rename(path.with_suffix(".before"))  # so that Lightning neither deletes it nor warns of it
    experiment = each.experiment
    path.with_suffix(".before").replace(path)
    experiment.metrics_keys = sorted(names)
