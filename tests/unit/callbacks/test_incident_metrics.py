"""Test what rank 0 tells the trainer's loggers of an incident, and that no logger ends the training for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

pl = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.loggers import Logger  # noqa: E402

from checkpointless.callbacks.checkpointless_callback import _incident_metrics, _log_incident  # noqa: E402
from checkpointless.inprocess import HPCallWrapper, RankShouldRestart  # noqa: E402
from checkpointless.recovery import CheckpointManager  # noqa: E402

pytestmark = pytest.mark.lightning


class Notebook(Logger):
    """Stands in for a logger that keeps what it is told, or raises."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.rows: list[tuple[dict[str, float], int | None]] = []
        self.error = error

    @property
    def name(self) -> str:
        return "notebook"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:  # type: ignore[override]
        """Keep the metrics, or raise."""
        if self.error is not None:
            raise self.error
        self.rows.append((metrics, step))


def call(**more: Any) -> HPCallWrapper:
    known = {"generation": 2, "incident": "2", "recovering_since_s": 10.0, "high_water": 7}
    manager = CheckpointManager()
    manager.bytes_received = 64
    return cast(Any, SimpleNamespace(**{**known, "checkpoint_manager": manager, **more}))


def test_it_says_what_is_known() -> None:
    assert _incident_metrics(call(), 8, 12.5) == {
        "checkpointless/incidents": 2,
        "checkpointless/generation": 2,
        "checkpointless/recovery_seconds": 2.5,
        "checkpointless/steps_lost": 0,
        "checkpointless/bytes_received": 64,
    }
    assert _incident_metrics(call(), 4, 12.5)["checkpointless/steps_lost"] == 4, "steps 4 to 7 are made again"
    unknown = call(incident="node-b", recovering_since_s=None, high_water=-1, checkpoint_manager=None)
    assert _incident_metrics(unknown, 1, 12.5) == {"checkpointless/generation": 2}


def trainer(*loggers: Logger) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return pl.Trainer(accelerator="cpu", devices=1, logger=list(loggers), **quiet)


def test_a_logger_that_raises_is_named_and_the_others_are_told(caplog: pytest.LogCaptureFixture) -> None:
    broken, good = Notebook(OSError("disk full")), Notebook()
    _log_incident(trainer(broken, good), call(), 8)
    ((metrics, step),) = good.rows
    assert (metrics["checkpointless/incidents"], step) == (2, 0)
    assert "Notebook did not take the metrics of an incident" in caplog.text
    assert "disk full" in caplog.text


def test_a_fault_meanwhile_interrupts_it() -> None:
    with pytest.raises(RankShouldRestart):
        _log_incident(trainer(Notebook(RankShouldRestart())), call(), 8)


def test_other_ranks_log_nothing() -> None:
    notebook = Notebook()
    _log_incident(cast(Any, SimpleNamespace(is_global_zero=False, loggers=[notebook])), call(), 8)
    assert notebook.rows == []
