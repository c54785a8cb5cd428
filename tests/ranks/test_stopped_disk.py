"""Test that a job of two nodes trains on and handles a fault while the disk of the run directory stops."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.observability.telemetry.events import EVENTS_FILE, read_events
from checkpointless.observability.telemetry.scribe import traceback_path
from tests.ranks.agent_job import Ended
from tests.ranks.test_agent_nodes import Nodes
from tests.stopped_paths import StoppedPaths
from tests.waiting import wait_until

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

NODE_TIMEOUT_S = 3.0
RANKS = range(4)


class TwoNodes(Nodes):
    """Note what their ranks do on a disk that does not stop."""

    def __init__(self, run_dir: Path, notes: Path) -> None:
        self._notes = notes
        notes.mkdir()
        super().__init__(run_dir, 2, str(notes), script="watched_steps.py", regroup_timeout_s=60.0)

    def steps(self, rank: int) -> list[dict[str, Any]]:
        path = self._notes / f"notes-{rank}.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def train(self, generation: int, after_s: float) -> None:
        """Wait until every rank has made three steps of a generation after a moment on the monotonic clock."""
        wait_until(
            lambda: all(
                sum(note["generation"] == generation and note["at_s"] > after_s for note in self.steps(rank)) >= 3
                for rank in RANKS
            ),
            60,
        )

    def pids(self, generation: int) -> dict[int, set[int]]:
        return {
            rank: {note["pid"] for note in self.steps(rank) if note["generation"] == generation} for rank in RANKS
        }

    def fail(self, how: str) -> None:
        made = self._notes / "made"
        made.write_text(how)
        made.rename(self._notes / "fault")

    def end(self, *, code: int = 0) -> list[Ended]:
        (self._notes / "end").touch()
        return super().end(code=code)


@pytest.mark.parametrize("how", ["raise", pytest.param("SIGKILL", marks=pytest.mark.long)])
def test_files_that_cannot_be_opened_for_a_while_delay_nobody(tmp_path: Path, how: str) -> None:
    """A fault comes meanwhile: the job recovers before the files can be opened, and ends well afterwards."""
    run_dir, for_s = tmp_path / "run", 2 * NODE_TIMEOUT_S
    run_dir.mkdir()
    job, told = TwoNodes(run_dir, tmp_path / "notes"), traceback_path(run_dir, 0, 1)
    job.train(0, 0.0)
    began_ns = time.time_ns()
    began_s = time.monotonic()
    stopped = StoppedPaths(run_dir / EVENTS_FILE, run_dir / "logs" / "rank-1.log", told)
    try:
        job.train(0, began_s + for_s / 2)
        job.fail(how)
        job.train(1, 0.0)
        wait_until(lambda: time.monotonic() > began_s + for_s, for_s + 10)
        job.train(1, time.monotonic())
    except BaseException:
        for agent in job.agents:
            agent.process.kill()
        raise
    finally:
        ended_ns = time.time_ns()
        stopped.go_on()
    first, second = job.end()
    assert "declared lost" not in first.err + second.err
    before, after = job.pids(0), job.pids(1)
    assert all(len(pids) == 1 for pids in (*before.values(), *after.values()))
    replaced = {rank for rank in RANKS if before[rank] != after[rank]}
    assert replaced == ({1} if how == "SIGKILL" else set())
    events = read_events(job.run_dir)
    assert not [event for event in events if event.stage == EventName.EVENTS_DROPPED]
    meanwhile = sorted((event for event in events if began_ns < event.ts < ended_ns), key=lambda event: event.ts)
    found = [event.stage for event in meanwhile if event.stage in (EventName.DETECT, EventName.RECOVERED)]
    assert found == ["detect", "recovered"]
    survivors = set(RANKS) - replaced
    for stage in ("abort", "finalize", "barrier"):
        ended = {event.rank for event in meanwhile if (event.stage, event.edge) == (stage, "end")}
        assert survivors <= ended, stage
    if how == "raise":
        assert "the loss is not a number" in told.read_text()


def test_a_job_ends_while_its_events_cannot_be_written(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    job = TwoNodes(run_dir, tmp_path / "notes")
    job.train(0, 0.0)
    stopped = StoppedPaths(run_dir / EVENTS_FILE)
    agents = job.end()
    stopped.go_on()
    for node, ended in enumerate(agents):
        assert f"the disk of {run_dir} does not answer: the last events of node {node} may be lost" in ended.err
