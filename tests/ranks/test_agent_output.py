"""Test that no rank ends or waits because of what it prints, and that a job's own output costs no exit status."""

import resource
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from checkpointless.observability.telemetry.event_names import EventName
from tests.ranks.agent_job import SCRIPTS, Job
from tests.waiting import wait_until

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

FLOOD = 12_000_000


def test_a_flood_that_nobody_reads_ends_and_fills_no_more_than_its_log(tmp_path: Path) -> None:
    job = Job(tmp_path, "prints.py", "0:flood", "1:endless", nproc=2, log_bytes=1 << 20)
    wait_until(lambda: all(f"rank {rank} is done" in job.log(rank) for rank in (0, 1)))
    peak = psutil.Process(job.process.pid).memory_info().rss if job.process.poll() is None else 0
    ended = job.end()
    assert len(ended.out) < 2 * FLOOD
    assert peak < 800 * 10**6
    for rank in (0, 1):
        sizes = [path.stat().st_size for path in (tmp_path / "logs").glob(f"rank-{rank}*.log")]
        assert sum(sizes) <= 1 << 20
        assert len(sizes) > 1


def test_a_full_disk_costs_output_and_no_rank(tmp_path: Path) -> None:
    job = Job(tmp_path, "prints.py", "0:slowly", "1:slowly", nproc=2)
    wait_until(lambda: "zzz" in job.log(0))
    resource.prlimit(job.process.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))  # the agent's disk is full now
    ended = job.end()
    assert ended.err == f"output of ranks is left out of {tmp_path / 'logs'}: File too large; training goes on\n"
    assert [len(job.log(rank)) <= 100_000 for rank in (0, 1)] == [True, True]
    assert not job.events(EventName.DETECT)
    for rank in (0, 1):
        assert f"[rank {rank}] rank {rank} is done" in ended.out
        assert ended.out.count("z" * 12_000) == 80


def test_the_last_lines_of_a_rank_are_said_though_what_it_started_goes_on_printing(tmp_path: Path) -> None:
    ended = Job(tmp_path, "prints.py", "1:leaves", nproc=2, stream_logs=False).end(code=1)  # else they were shown
    assert "why it ends" in ended.err


def test_logs_go_to_the_directory_that_was_asked_for(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", "prints.py", nproc=2, log_dir=tmp_path / "logs")
    job.end()
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"rank-0.log", "rank-1.log", "zygote.log"}
    assert not (tmp_path / "run" / "logs").exists()


@pytest.mark.parametrize("streams", [">&- 2>&-", "2>&1 | head -1; exit ${PIPESTATUS[0]}"])
def test_a_job_ends_well_though_nobody_takes_what_it_says(tmp_path: Path, streams: str) -> None:
    command = f"{sys.executable} -m checkpointless run --run-dir {tmp_path / 'run'} {SCRIPTS / 'prints.py'}"
    ended = subprocess.run(["bash", "-c", f"{command} 0:flood {streams}"], cwd=tmp_path, timeout=120, check=False)
    assert ended.returncode == 0
    assert "rank 0 is done" in (tmp_path / "run" / "logs" / "rank-0.log").read_text()
