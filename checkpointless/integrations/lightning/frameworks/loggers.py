"""A trainer's loggers over a restart: they write on in the folder of the ones before."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger

from checkpointless.launcher.protocol.board import Facts

_NEMO_VERSION = "NEMO_EXPM_VERSION"  # nemo.constants.NEMO_ENV_VARNAME_VERSION


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
