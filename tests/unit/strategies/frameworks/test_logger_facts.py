"""Test facts of loggers: where a trainer's successor writes on, and which rows it drops."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nemo.lightning", reason="needs NeMo")

from lightning.pytorch.loggers import CSVLogger
from nemo.constants import NEMO_ENV_VARNAME_VERSION

from checkpointless.inprocess.facts import Facts
from checkpointless.integrations.lightning.frameworks.logger_facts import LoggerFacts
from checkpointless.state.snapshot import SnapshotPoint

pytestmark = pytest.mark.nemo


def facts_of(folder: Path, facts: Facts, rank: int = 0) -> tuple[LoggerFacts, CSVLogger]:
    made = CSVLogger(str(folder), flush_logs_every_n_steps=1)
    trainer: Any = SimpleNamespace(loggers=[made], is_global_zero=rank == 0, global_step=4)
    return LoggerFacts(trainer, facts), made


def steps(logger: CSVLogger) -> list[int]:
    rows = Path(logger.experiment.metrics_file_path).read_text().splitlines()
    column = rows[0].split(",").index("step")
    return [int(row.split(",")[column]) for row in rows[1:]]


def test_a_successor_writes_on_in_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NEMO_ENV_VARNAME_VERSION, "yesterday")
    kept = Facts(None)
    before, logger = facts_of(tmp_path, kept)
    for step in range(4):
        logger.log_metrics({"loss": 1.0}, step)
    before.keep(fit=2)
    assert kept.get("environment") == {NEMO_ENV_VARNAME_VERSION: "yesterday"}
    after, again = facts_of(tmp_path, kept)
    after.write_on(fit=2)
    assert again.log_dir == logger.log_dir
    after.forget_rows(2, 1, SnapshotPoint.CHECKED)
    assert steps(again) == [0, 1]


@pytest.mark.parametrize(
    ("step", "stage", "left"),
    [
        (3, SnapshotPoint.ENDED, [0, 1, 2]),
        (3, SnapshotPoint.CHECKED, [0, 1, 2, 2]),
        (3, SnapshotPoint.TURNED, [0, 1]),
        (2, SnapshotPoint.ENDED, [0, 1]),
    ],
)
def test_rows_from_before_a_validation_or_the_end_of_an_epoch_stay_and_others_go(
    tmp_path: Path, step: int, stage: SnapshotPoint, left: list[int]
) -> None:
    """Lightning logs what belongs to an epoch as of the step before."""
    facts, logger = facts_of(tmp_path, Facts(None))
    for each in range(3):
        logger.log_metrics({"loss": 1.0}, each)
    facts.keep_rows(3, SnapshotPoint.ENDED)
    logger.log_metrics({"val_loss": 1.0}, 2)
    facts.keep_rows(3, SnapshotPoint.CHECKED)
    logger.log_metrics({"epoch_loss": 1.0}, 2)
    logger.log_metrics({"loss": 1.0}, 3)
    facts.forget_rows(2, step, stage)
    assert steps(logger) == left


def test_other_ranks_keep_nothing(tmp_path: Path) -> None:
    kept = Facts(None)
    facts, _ = facts_of(tmp_path, kept, rank=1)
    facts.keep(1)
    facts.keep_rows(3, SnapshotPoint.ENDED)
    facts.forget_rows(0, 3, SnapshotPoint.ENDED)
    assert [kept.get(name) for name in ("loggers of fit 1", "environment", "rows")] == [None, None, None]
