"""Test what a trainer's own logger and Prometheus have of the incidents of a real NeMo job."""

from __future__ import annotations

import csv
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpointless.observability.telemetry.event_names import Rung
from tests.ports import free_port
from tests.ranks.jobs import Disturb, Scene

pytestmark = [pytest.mark.ranks, pytest.mark.nemo, pytest.mark.timeout(400)]


def rows(folder: Path) -> Iterator[dict[str, float]]:
    """Yield the rows of every version of the file, the oldest first."""
    for path in sorted(folder.rglob("metrics.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                yield {key: float(value) for key, value in row.items() if value}


class Scraper:
    """Asks an agent for its metrics until the ranks have been through an incident.

    Args:
        port: where it serves them.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.text = ""

    def __call__(self, scene: Scene) -> None:
        scene.wait_for(lambda: self.ask() and self.value('stage_seconds_count{stage="first_step"}') > 0)

    def ask(self) -> bool:
        """Ask for the metrics, and return whether the agent answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as reply:
                self.text = reply.read().decode()
        except OSError:
            return False
        return True

    def value(self, sample: str) -> float:
        """Return the value of a sample, by its name and labels."""
        name, _, labels = sample.partition("{")
        wanted = set(re.findall(r'\w+="[^"]*"', labels))  # besides those that say whose it is
        samples = re.findall(rf"^checkpointless_{name}{{(.*)}} (\S+)$", self.text, re.M)
        (found,) = [value for given, value in samples if wanted <= set(re.findall(r'\w+="[^"]*"', given))]
        return float(found)


def test_each_incident_is_logged_once_where_the_loss_goes_on(disturb: Disturb, tmp_path: Path) -> None:
    """The first is another rank's. In the second, rank 0, which logs, dies: its next process knows when."""
    pytest.importorskip("prometheus_client")
    scraper = Scraper(free_port())
    logger = f"trainer.logger={{_target_: lightning.pytorch.loggers.CSVLogger, save_dir: {tmp_path}}}"
    # The first fault comes before the vote of step 2, and not earlier: rank 0 has logged step 1 by then.
    faults = ["exception@before_optimizer:rank=1,step=2", "sigkill@forward:rank=0,step=4"]
    faults.append("slow@forward:rank=1,step=5,seconds=4")  # events are read once per second, and this job takes two
    job = disturb(2, 5, *faults, args=(logger,), http_port=scraper.port, meanwhile=scraper)

    calm = list(rows(tmp_path / "lightning_logs" / "version_0"))  # this run had no faults
    assert not any(key.startswith("checkpointless/") for row in calm for key in row)
    found = list(rows(tmp_path / "lightning_logs"))[len(calm) :]
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

    stages_s = job.incidents[0].stages_s
    for stage in (
        "notify",
        "abort",
        "finalize",
        "health",
        "barrier",
        "init",
        "rebuild",
        "decide",
        "verify",
        "data",
    ):
        assert scraper.value(f'stage_seconds_count{{stage="{stage}"}}') >= 1
    assert scraper.value('stage_seconds_sum{stage="init"}') >= 0.9 * stages_s["init"]
    assert scraper.value('faults_injected_total{kind="exception"}') == 1
    assert scraper.value('faults_injected_total{kind="hang"}') == 0
