"""Test copies of the state in tiers: what no living rank holds any more comes back from them, equal to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from checkpointless.faults.ledger import fired
from checkpointless.report.incidents import IncidentSummary
from checkpointless.report.verify import Steps, compare
from checkpointless.telemetry.event_names import EventName
from checkpointless.telemetry.events import Event, read_events
from tests.ranks.jobs import Job, run_job
from tests.ranks.layouts import DROPOUT, TP2
from tests.ranks.nemo_zygote import Zygote

pytestmark = [pytest.mark.ranks, pytest.mark.nemo, pytest.mark.timeout(400)]

ONE_INSTANCE = ("strategy.num_distributed_optimizer_instances=1",)
PHASES = ("data", "forward", "backward", "sync", "before_optimizer", "optimizer", "after_optimizer", "between")


def tiers(**settings: str) -> tuple[str, ...]:
    """Return the override that asks for tiers, each with its settings as YAML."""
    return ("checkpointless.tiers={" + ", ".join(f"{name}: {{{value}}}" for name, value in settings.items()) + "}",)


class Kept:
    """Runs jobs with tiers, and compares them with undisturbed ones that have none."""

    def __init__(self, zygote: Zygote, undisturbed: Callable[..., Steps], run_dir: Path) -> None:
        self._zygote = zygote
        self._undisturbed = undisturbed
        self._run_dir = run_dir

    def run(self, tiers: tuple[str, ...], steps: int, *faults: str, args: tuple[str, ...], nproc: int = 4) -> Job:
        """Run a job with faults; each has to happen, and every step to end as without them."""
        args = (f"trainer.max_steps={steps}", *args)
        job = run_job(self._zygote, self._run_dir, nproc, args=(*args, *tiers), faults=faults)
        assert job.code == 0, job.story()
        assert fired(job.run_dir) == dict.fromkeys(faults, 1)
        verdict = compare(self._undisturbed(nproc, args), job.steps)
        assert verdict.difference is None, f"{verdict.sentence}\n{job.story()}"
        assert not verdict.missing, f"{verdict.sentence}\n{job.story()}"
        assert verdict.steps == steps
        again = {place.step for place in verdict.repeated}
        assert again <= {step for each in job.incidents for step in each_lost(each)}
        return job


def each_lost(incident: IncidentSummary) -> range:
    """Return the finished steps that were made once more after an incident."""
    if incident.resumed_after is None or incident.committed is None:  # another incident took it over
        return range(0)
    return range(incident.resumed_after + 1, incident.committed + 1)


@pytest.fixture
def kept(nemo_zygote: Zygote, undisturbed: Callable[..., Steps], tmp_path: Path) -> Kept:
    return Kept(nemo_zygote, undisturbed, tmp_path / "run")


def taken(job: Job) -> list[Event]:
    """Return, in the order of the log, where each rank's state came from."""
    return [event for event in read_events(job.run_dir) if event.stage == EventName.COPIES and event.edge == "end"]


def sources(job: Job, generation: int) -> dict[int | None, tuple[str, int]]:
    """Return the tier and the holder that each rank was filled from in a generation."""
    return {
        event.rank: (event.fields["tier"], event.fields["holder"])
        for event in taken(job)
        if event.generation == generation
    }


@pytest.mark.parametrize("args", [(), TP2], ids=["dp4", "tp2"])
def test_one_instance_loses_no_finished_step(kept: Kept, args: tuple[str, ...]) -> None:
    """Each rank is killed in two phases; the copies of the step before are with its neighbor."""
    steps = range(2, 2 * len(PHASES) + 1, 2)
    faults = [f"sigkill@{phase}:rank={step // 2 % 4},step={step}" for step, phase in zip(steps, PHASES)]
    job = kept.run(
        tiers(neighbor_memory="overlap: false"), steps[-1] + 2, *faults, args=(*ONE_INSTANCE, *args, *DROPOUT)
    )
    for incident, step, phase in zip(job.incidents, steps, PHASES, strict=True):
        assert incident.respawned == (step // 2 % 4,)
        made = phase in ("after_optimizer", "between")
        assert incident.resumed_after == (step if made else step - 1), phase
        # The others made the step in which the rank was killed in the middle of its update.
        assert incident.steps_lost == (phase == "optimizer"), phase


def both_holders_at(step: int) -> tuple[str, str]:
    """Return faults that kill both holders of the shard of ranks 0 and 2, the second before it can give it."""
    return f"sigkill@forward:rank=0,step={step}", f"sigkill@recovery:rank=2,step={step - 1}"


@pytest.mark.parametrize(
    ("settings", "after", "tier"),
    [
        ({"neighbor_memory": "overlap: false"}, 7, "neighbor memory"),
        ({"local_directory": "path: {tmp}, every: 3"}, 6, "local directory"),
        ({"shared_directory": "path: {tmp}, every: 5"}, 5, "shared directory"),
    ],
    ids=["neighbor", "local", "shared"],
)
def test_both_holders_of_a_shard_are_lost(
    kept: Kept, tmp_path: Path, settings: dict[str, str], after: int, tier: str
) -> None:
    """Storage has nothing; the newest copy that is whole is used, with the random streams that belong to it."""
    wanted = tiers(**{name: value.replace("{tmp}", str(tmp_path / "copies")) for name, value in settings.items()})
    job = kept.run(wanted, 10, *both_holders_at(8), args=DROPOUT)
    assert (job.incidents[-1].committed, job.incidents[-1].resumed_after) == (7, after)
    assert {sources(job, 2)[rank][0] for rank in (0, 2)} == {tier}
    lost = {event.fields["steps_lost"] for event in taken(job)}
    assert lost == {7 - after}
