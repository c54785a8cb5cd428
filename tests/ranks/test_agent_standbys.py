"""Test standbys under a real agent: they take the place of ranks that die, and leave nothing behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from checkpointless.agent.launch_config import DEFAULT_TERM_GRACE_S
from checkpointless.telemetry.events import read_events
from tests.ranks.agent_job import Job, is_alive, wait_until
from tests.ranks.jobs import Disturb
from tests.ranks.layouts import DROPOUT

pytestmark = pytest.mark.ranks

FORKED: dict[str, Any] = {"preload": ("numpy",)}
FRESH: dict[str, Any] = {"preload": ("numpy", "sets_up_cuda")}
BOTH = pytest.mark.parametrize("mode", [FORKED, FRESH], ids=["forked", "fresh"])
#: Each fresh process imports for seconds.
FRESH_IS_LONG = pytest.mark.parametrize(
    "mode", [pytest.param(FORKED, id="forked"), pytest.param(FRESH, id="fresh", marks=pytest.mark.long)]
)
ENDLESS = {"STEPS": "100000"}


def told(job: Job, fate: str = "ready") -> list[int]:
    """Return the numbers of the standbys that this was told of so far."""
    return [event.fields["process"] for event in job.events("standby") if event.fields["fate"] == fate]


def wait_for_standbys(job: Job, count: int) -> list[int]:
    """Wait until so many have been ready."""
    wait_until(lambda: len(told(job)) >= count)
    return told(job)


def living(job: Job, rank: int) -> int:
    """Return the number of the rank's newest process that is in its block."""
    return job.notes("go", rank)[-1]["pid"]


def kill(job: Job, *ranks: int) -> None:
    """Kill the processes of these ranks, and wait until new ones make steps."""
    before = {rank: living(job, rank) for rank in ranks}
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: all(job.notes("step", rank)[-1]["pid"] != pid for rank, pid in before.items()))


def places(job: Job) -> list[tuple[int, bool]]:
    """Return which ranks got new processes, and which of these had been standbys."""
    return [(event.rank, event.fields["standby"]) for event in job.events("respawn") if event.edge == "end"]


def stop(job: Job) -> str:
    """End the job by Ctrl-C, and return what it said; nothing is left then."""
    job.process.send_signal(signal.SIGINT)
    ended = job.end()
    assert ended.code == 1
    assert ended.err.splitlines()[-1] == "stopped by SIGINT"
    return ended.err


@BOTH
def test_a_standby_takes_the_place_of_a_rank(tmp_path: Path, mode: dict[str, Any]) -> None:
    job = Job(tmp_path, "steps.py", "1:4:0:gate", "1:5:0:SIGKILL", warm_spares=1, **mode)
    (standby,) = wait_for_standbys(job, 1)
    (tmp_path / "gate").touch()
    ended = job.end()
    assert ended.code == 0, ended.err
    assert places(job) == [(1, True)]
    assert living(job, 1) == standby
    assert "incarnation 1 begins" in job.log(1)
    assert [n["step"] for n in job.notes("step", 1)] == list(range(1, 11))
    assert "a standby is lost" not in ended.err
    if mode is FRESH:
        assert "standbys do without sets_up_cuda, which sets up CUDA when it is imported" in ended.err
        assert "has set up CUDA" in (tmp_path / "logs" / "zygote.log").read_text()


@FRESH_IS_LONG
@pytest.mark.parametrize("count", [1, 2])
def test_two_ranks_that_die_at_once(tmp_path: Path, mode: dict[str, Any], count: int) -> None:
    job = Job(tmp_path, "steps.py", warm_spares=count, env=ENDLESS, **mode)
    wait_for_standbys(job, count)
    kill(job, 0, 2)
    assert sorted(rank for rank, _ in places(job)) == [0, 2]
    assert sum(was_standby for _, was_standby in places(job)) == count
    assert len(wait_for_standbys(job, 2 * count)) == 2 * count
    stop(job)


@FRESH_IS_LONG
def test_ten_deaths_one_after_the_other(
    tmp_path: Path, short_folder: Path, monkeypatch: pytest.MonkeyPatch, mode: dict[str, Any]
) -> None:
    """No descriptor, process or folder stays, also if each place is taken by a standby."""
    monkeypatch.setenv("TMPDIR", str(short_folder))
    deaths = 10 if mode is FORKED else 3
    job = Job(tmp_path, "steps.py", warm_spares=1, env=ENDLESS, **mode)
    counts = []
    for death in range(deaths):
        wait_for_standbys(job, death + 1)
        keepers = [psutil.Process(job.process.pid), *([job.zygote()] if mode is FORKED else [])]
        (folder,) = short_folder.iterdir()
        of_ranks = len(list(folder.iterdir()))
        counts.append(([keeper.num_fds() for keeper in keepers], len(job.left()), of_ranks))
        kill(job, death % 3)
    assert counts == counts[:1] * deaths
    assert places(job) == [(death % 3, True) for death in range(deaths)]
    stop(job)
    assert list(short_folder.iterdir()) == []


@FRESH_IS_LONG
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_standby_that_cannot_take_the_place(tmp_path: Path, mode: dict[str, Any], number: signal.Signals) -> None:
    job = Job(tmp_path, "steps.py", warm_spares=1, env=ENDLESS, **mode)
    (standby,) = wait_for_standbys(job, 1)
    os.kill(standby, number)
    if number == signal.SIGKILL:
        wait_until(lambda: told(job, "lost") == [standby])
    else:
        wait_until(lambda: psutil.Process(standby).status() == psutil.STATUS_STOPPED)
    kill(job, 1)
    assert places(job) == [(1, False)]
    wait_until(lambda: told(job, "lost") == [standby] and not is_alive(standby))
    assert len(wait_for_standbys(job, 2)) == 2
    kill(job, 2)
    assert places(job)[1:] == [(2, True)]
    why = "it was killed by SIGKILL" if number == signal.SIGKILL else "it was stopped"
    assert f"a standby is lost: {why}; until there is another, ranks are started without" in stop(job)


@FRESH_IS_LONG
def test_a_rank_that_was_a_standby_is_like_any_other(tmp_path: Path, mode: dict[str, Any]) -> None:
    job = Job(tmp_path, "traits.py", warm_spares=1, env=ENDLESS, **mode)
    wait_for_standbys(job, 1)
    kill(job, 1)
    assert places(job) == [(1, True)]
    before, after = ({**n, "pid": 0, "mono": 0} for n in job.notes("traits", 1))
    assert after == before
    drawn = job.notes("drawn")
    assert len(drawn) == 4
    assert len({n["numpy"] for n in drawn}) == len({n["python"] for n in drawn}) == 4
    stop(job)


def test_an_interrupt_ends_a_standby_that_still_imports(tmp_path: Path) -> None:
    job = Job(tmp_path, "steps.py", warm_spares=2, env=ENDLESS, **FRESH)
    wait_until(lambda: any("standbys.process" in " ".join(process.cmdline()) for process in job.left()))
    assert told(job) == []
    stop(job)


@FRESH_IS_LONG
def test_a_killed_agent_leaves_no_standby(tmp_path: Path, mode: dict[str, Any]) -> None:
    job = Job(tmp_path, "steps.py", warm_spares=2, env=ENDLESS, **mode)
    wait_for_standbys(job, 2)
    job.process.kill()
    job.process.communicate(timeout=60)
    wait_until(lambda: not job.left(), timeout_s=DEFAULT_TERM_GRACE_S)


def test_a_killed_zygote_takes_its_standbys_with_it(tmp_path: Path) -> None:
    job = Job(tmp_path, "steps.py", warm_spares=2, env=ENDLESS, **FORKED)
    wait_for_standbys(job, 2)
    job.zygote().kill()
    ended = job.end()
    assert (ended.code, ended.err) == (1, "the process that starts ranks was killed by SIGKILL\n")


@pytest.mark.long
@pytest.mark.nemo
@pytest.mark.timeout(400)
def test_every_step_is_that_of_an_undisturbed_run(disturb: Disturb) -> None:
    faults = ("sigkill@backward:rank=1,step=12", "sigkill@optimizer:rank=0,step=20", "sigkill@data:rank=3,step=28")
    job = disturb(4, 30, *faults, args=DROPOUT, warm_spares=2)
    ends = [event for event in read_events(job.run_dir) if event.stage == "respawn" and event.edge == "end"]
    assert [(event.rank, event.fields["standby"]) for event in ends] == [(1, True), (0, True), (3, True)]
