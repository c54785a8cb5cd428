"""Test that ten incidents in one job of Megatron-Bridge leave nothing behind, in its ranks and on the machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from checkpointless.observability.telemetry.event_names import EventName
from tests.ranks.agent_job import is_alive
from tests.ranks.jobs import PHASES, Scene, Trainings, require_nothing_left
from tests.ranks.test_demo_trainers import INCIDENTS
from tests.ranks.test_kill_everything import GONE_WITHIN_S, SHARED_MEMORY, files
from tests.waiting import wait_until

pytestmark = [pytest.mark.ranks, pytest.mark.nemo, pytest.mark.timeout(400)]

SCRIPT = str(Path(__file__).parent / "scripts" / "train.py")
RANKS, STEPS = 4, 4 * INCIDENTS + 10
FAULTS = tuple(
    f"{'sigkill' if at % 2 else 'exception'}@{PHASES[at % 7]}:rank={1 + at % 3},step={4 * at + 2}"
    for at in range(INCIDENTS)
)


class Census:
    """Counts the processes of a job while it trains."""

    def __init__(self) -> None:
        self.seen: set[psutil.Process] = set()
        self.counts: list[int] = []

    def take(self, scene: Scene) -> None:
        """Count until rank 0 has made all but a few of its steps."""
        scene.wait_for(lambda: scene.stages("job"))
        (agent,) = (psutil.Process(event.pid) for event in scene.stages("job") if event.edge == "begin")
        path = scene.run_dir / "steps" / "rank-0.jsonl"
        deadline = time.monotonic() + 120
        made = 0
        while made < STEPS - 2:
            assert time.monotonic() < deadline, "it did not come to its last steps"
            children = set(agent.children(recursive=True))
            made = len(path.read_text().splitlines()) if path.exists() else 0
            self.seen |= children
            settled = [event for event in scene.stages(EventName.SETTLED) if event.rank == 0]
            if len(settled) == INCIDENTS:
                self.counts.append(len(children))
            time.sleep(0.01)


@pytest.fixture
def folder(short_folder: Path) -> Iterator[Path]:
    """Yield the job's folder for temporary files. Nothing may be there afterwards, nor more in shared memory."""
    before = files(SHARED_MEMORY)
    yield short_folder
    assert files(short_folder) == set()
    left = files(SHARED_MEMORY) - before  # also other jobs', which go with them
    wait_until(lambda: not left & files(SHARED_MEMORY), 120.0)


def test_ten_incidents_leave_nothing_behind(trainings: Trainings, folder: Path) -> None:
    """Ranks 1 to 3 raise and die by turns, in every phase; rank 0 lives through it all."""
    census = Census()
    args = (str(STEPS), "data=cyclic", "workers=1")
    job = trainings.rough(RANKS, args, *FAULTS, steps=STEPS, tmp=folder, meanwhile=census.take)
    assert len(job.incidents) == INCIDENTS

    require_nothing_left(job, 0, INCIDENTS)
    assert max(census.counts) == 1 + 2 * RANKS, "the zygote, and each rank with one data-loader worker"
    assert len(census.seen) >= 1 + 2 * RANKS * (INCIDENTS + 1) // 2
    wait_until(lambda: not any(is_alive(process.pid) for process in census.seen), GONE_WITHIN_S)
