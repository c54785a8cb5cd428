"""Test that a checkpoint that cannot be saved costs that checkpoint, and neither the job nor what else is there."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpointless.observability.report.summary import _failed_saves
from checkpointless.observability.telemetry.events import read_events
from tests.ranks.jobs import Job
from tests.ranks.users.end import SPOILS_ENV, read_ends
from tests.ranks.users.runs import Run, Runs

pytestmark = [pytest.mark.ranks, pytest.mark.nemo, pytest.mark.timeout(400)]

NPROC = 2


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """Yield a run directory with a small file system of its own for the checkpoints."""
    folder = tmp_path / "run"
    storage = folder / "nemo"
    storage.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(storage)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(storage)], capture_output=True, check=False)


@pytest.fixture
def spoiled(runs: Runs, run_dir: Path) -> Callable[..., Job]:
    """Return a function that makes a run with storage that is spoiled as it is told."""

    def make(features: str, steps: int, spoils: str, **settings: Any) -> Job:
        return runs.make(Run(features, steps), run_dir=run_dir, extra_env={SPOILS_ENV: spoils}, **settings)

    return make


def not_saved(job: Job) -> dict[str, str]:
    found = [*_failed_saves(read_events(job.run_dir))]
    logs = "".join(job.log(rank) for rank in range(NPROC))
    assert logs.count("could not be saved (rank") == len(found)
    return {Path(each["path"]).name: each["reason"] for each in found}


def trained(job: Job) -> dict[int, list[tuple[int, str, str]]]:
    """Return what each rank's steps led to, without the callbacks' books."""
    return {rank: [(each.step, each.loss, each.params) for each in steps] for rank, steps in job.steps.items()}


def books(job: Job) -> list[dict[str, Any]]:
    """Return what the callback of each rank believes to be on storage at the end."""
    return [end["fits"]["0"]["callbacks"]["ModelCheckpoint"] for end in read_ends(job.run_dir, NPROC)]


def saved(job: Job) -> set[str]:
    """Return the names of the checkpoints on storage, of which every one is whole."""
    found = {path for path in (job.run_dir / "nemo").glob("**/checkpoints/*") if path.name != "filler"}
    for path in found:
        assert (path / "weights" / ".metadata").is_file(), path
        assert (path / "weights" / "metadata.json").is_file(), path
    return {path.name for path in found}


@pytest.mark.parametrize(
    ("features", "spoils", "failed", "whole"),
    [
        pytest.param(
            "modelckpt",
            "full 3 4,writer 7 8,blocked 11 12",
            {
                "users-step=3": "No space left on device",
                "users-step=3-last": "No space left on device",
                "users-step=7": "the process that wrote a part of it ended with signal 9",
                "users-step=11": "File exists",
                "users-step=11-last": "File exists",
            },
            {"users-step=1", "users-step=5", "users-step=9", "users-step=12-last"},
            id="at-once",
        ),
        pytest.param(
            "modelckpt,async-save",
            "full 3 4,writer 5 6,proxy 9 10",
            {
                "users-step=3": "No space left on device",
                "users-step=3-last": "No space left on device",
                "users-step=5": "the process that wrote a part of it ended with signal 9",
                "users-step=9": "the process that wrote it in the background was lost",
            },
            {"users-step=1", "users-step=7", "users-step=11", "users-step=12-last"},
            id="in-the-background",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "modelckpt",
            "alone 7 8",
            {"users-step=7": "Input/output error", "users-step=7-last": "Input/output error"},
            {"users-step=1", "users-step=3", "users-step=5", "users-step=9", "users-step=11", "users-step=12-last"},
            id="alone",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_save_that_fails_costs_that_checkpoint(
    runs: Runs, spoiled: Callable[..., Job], features: str, spoils: str, failed: dict[str, str], whole: set[str]
) -> None:
    job = spoiled(features, 13, spoils)
    assert len(job.incidents) == ("alone" in spoils)
    reasons = not_saved(job)
    early = {"users-step=1", "users-step=1-last"} & reasons.keys()  # the background may still be writing them
    assert not early or "async-save" in features
    assert reasons.keys() - early == failed.keys()
    for name, reason in failed.items():
        assert reason in reasons[name]
    assert saved(job) == whole - early
    for each in books(job):
        assert {each["best_model_path"], each["last_model_path"]} <= {f"{name}.ckpt" for name in whole}
    assert trained(job) == trained(runs.calm(Run("", 13, nproc=NPROC)))  # saves change nothing of it


@pytest.mark.long
@pytest.mark.parametrize("more", ["", ",async-save"])
def test_what_a_failed_save_would_have_replaced_stays(spoiled: Callable[..., Job], more: str) -> None:
    """Two are kept, the best; each validation is better than the one before."""
    job = spoiled(f"monitored{more}", 8, "writer 7 8")
    assert set(not_saved(job)) == {"users-step=7"}
    assert saved(job) == {"users-step=3", "users-step=5", "users-step=7-last"}
    for each in books(job):
        assert set(each["best_k"]) == {"users-step=3.ckpt", "users-step=5.ckpt"}
        assert each["best_model_path"] == "users-step=5.ckpt"
        assert each["last_model_path"] == "users-step=7-last.ckpt"


@pytest.mark.long
@pytest.mark.parametrize("how", ["common", "rank"])
def test_a_rank_that_is_killed_in_a_save_costs_no_checkpoint(spoiled: Callable[..., Job], how: str) -> None:
    job = spoiled("modelckpt", 5, f"{how} 3 4")
    assert len(job.incidents) == 1
    assert not not_saved(job)
    assert saved(job) == {"users-step=1", "users-step=3", "users-step=4-last"}


def test_a_failed_save_ends_the_job_if_that_is_asked_for(spoiled: Callable[..., Job]) -> None:
    job = spoiled("modelckpt,strict-saves", 7, "full 3 4", code=1)
    assert "could not be saved" in job.said[-1]
    assert "on_save_error is 'raise'" in job.said[-1]
    assert saved(job) == {"users-step=1", "users-step=1-last"}
