"""Test from when a fault counts, and what is said when an incident is over and when it was not exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointless.launcher.protocol.messages import Inexact
from checkpointless.observability.telemetry.events import EVENTS_FILE, Event, read_events
from tests.unit.messaged_job import Job


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(events=tmp_path / EVENTS_FILE).begin()


def recovers(job: Job, run_dir: Path, *inexact: int) -> Event:
    """Have rank 0 fail, and all make step 4 again, not exactly on some ranks; return the event of that."""
    job.raises(0)
    job.ready(*job.ranks, committed=3, making=4)
    differ(job, *inexact)
    job.progress(4)
    (recovered,) = [event for event in read_events(run_dir) if event.stage == "recovered"]
    return recovered


def differ(job: Job, *ranks: int) -> None:
    for rank in ranks:
        job.tell(rank, Inexact(1, "step 4 takes another batch", rank=rank))


def test_a_fault_counts_from_when_it_happened(job: Job, tmp_path: Path) -> None:
    job.coordinator.membership.lose(job.coordinator.nodes[1], "no word from it for 7 s", job.now_s() - 7)
    job.join(1)
    recovered = recovers(job, tmp_path)
    (detect,) = [event for event in read_events(tmp_path) if event.stage == "detect"]
    assert 7 <= detect.fields["undetected_s"] < 67
    assert 7 <= recovered.fields["seconds"] < 67
    assert (recovered.fields["step"], recovered.fields["made"]) == (4, True)
    assert job.said[-1] == f"incident 1: recovered in {recovered.fields['seconds']:.2f} s (node); nothing was lost"


def test_what_is_not_exact_is_in_the_last_line(job: Job, tmp_path: Path) -> None:
    recovered = recovers(job, tmp_path, 1, 0, 1)
    assert job.said[-1].startswith("incident 1: resumed, not exact, in ")
    assert job.said[-1].endswith(" s (in-process); rank 0: step 4 takes another batch (1 other rank too)")
    assert recovered.fields["inexact"] == "rank 0: step 4 takes another batch (1 other rank too)"
    assert job.coordinator.job.incidents.inexact == 1


def test_a_second_line_corrects_the_last_one_once(job: Job, tmp_path: Path) -> None:
    recovers(job, tmp_path)
    before = len(job.said)
    differ(job, 1, 0)
    assert job.said[before:] == ["incident 1: resumed, not exact: rank 1: step 4 takes another batch"]
    assert job.coordinator.job.incidents.inexact == 1
