"""What a trainer's own logger has of an incident, in a real NeMo job: a CSV file, read."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpointless.telemetry.incidents import Rung
from tests.ranks.jobs import Disturb

pytestmark = [pytest.mark.ranks, pytest.mark.nemo, pytest.mark.timeout(120)]


def rows(folder: Path) -> Iterator[dict[str, float]]:
    """What every version of the file says, the oldest first."""
    for path in sorted(folder.rglob("metrics.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                yield {key: float(value) for key, value in row.items() if value}


def test_each_incident_is_logged_once_where_the_loss_goes_on(disturb: Disturb, tmp_path: Path) -> None:
    """The first is another rank's; of the second rank 0, which logs, dies: its next process knows when."""
    logger = f"trainer.logger={{_target_: lightning.pytorch.loggers.CSVLogger, save_dir: {tmp_path}}}"
    faults = ("exception@backward:rank=1,step=2", "sigkill@forward:rank=0,step=4")
    job = disturb(2, 5, *faults, args=(logger,))

    found = list(rows(tmp_path / "lightning_logs"))
    assert [row["step"] for row in found if "reduced_train_loss" in row] == [0, 1, 2, 3, 4]
    first, second = (row for row in found if any(key.startswith("checkpointless/") for key in row))
    shared = {"checkpointless/steps_lost": 0.0}
    for number, row in enumerate((first, second), start=1):
        seconds = row.pop("checkpointless/recovery_seconds")
        incident = job.incidents[number - 1]
        assert incident.headline_s is not None
        assert 0 < seconds <= incident.headline_s + 0.1
        assert seconds > sum(incident.stages_s[stage] for stage in ("init", "rebuild", "decide"))
        shared |= {"checkpointless/incidents": number, "checkpointless/generation": number}
        nbytes = row.pop("checkpointless/bytes_received")
        assert (nbytes > 0) == (incident.rung is Rung.PROCESS)
        assert row == {"step": 2 * number - 1, **shared}
