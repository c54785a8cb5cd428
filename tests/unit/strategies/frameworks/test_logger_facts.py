"""Test facts of loggers: where a trainer's successor writes on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger

from checkpointless.integrations.lightning.recoverable_strategy import _keep_loggers, _resume_loggers
from checkpointless.launcher.protocol.board import Facts

pytestmark = pytest.mark.lightning


def trainer_of(folder: Path, rank: int = 0) -> Any:
    return SimpleNamespace(
        loggers=[CSVLogger(str(folder), flush_logs_every_n_steps=1)], is_global_zero=rank == 0, global_step=4
    )


def test_a_successor_writes_on_in_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_EXPM_VERSION", "yesterday")
    facts, before = Facts(None), trainer_of(tmp_path)
    for step in range(3):
        before.loggers[0].log_metrics({"loss": 1.0}, step)
    _keep_loggers(before, facts, fit=2)
    assert facts.get("environment") == {"NEMO_EXPM_VERSION": "yesterday"}
    after = trainer_of(tmp_path)
    _resume_loggers(after, facts, fit=2)
    (logger,) = after.loggers
    assert logger.log_dir == before.loggers[0].log_dir
    logger.log_metrics({"loss": 2.0, "more": 1.0}, 3)
    logger.save()
    rows = Path(logger.experiment.metrics_file_path).read_text().splitlines()
    assert rows == ["loss,more,step", "1.0,,0", "1.0,,1", "1.0,,2", "2.0,1.0,3"]


def test_other_ranks_keep_nothing(tmp_path: Path) -> None:
    facts = Facts(None)
    _keep_loggers(trainer_of(tmp_path, rank=1), facts, 1)
    assert facts.get("loggers of fit 1") is None
