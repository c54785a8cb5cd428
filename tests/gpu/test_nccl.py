"""Test NCCL itself: generations of one process, and aborts with several ranks on one GPU where it can."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpointless.system import nccl
from tests.gpu.isolated import Record, note, run, run_ranks
from tests.gpu.jobs import LOOP, Undisturbed, check_equal
from tests.gpu.jobs import run as run_job
from tests.gpu.nccl import SHARED, SHARED_SINCE
from tests.ports import free_port

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

BODIES = "tests.gpu.nccl"
VERSION = nccl.in_force() if torch.cuda.is_available() else ()
several = pytest.mark.skipif(
    torch.cuda.is_available() and VERSION < SHARED_SINCE,
    reason=f"NCCL {'.'.join(map(str, VERSION))} lets no two ranks share a GPU; "
    f"{'.'.join(map(str, SHARED_SINCE))} and newer do",
)


def ports(count: int) -> list[str]:
    return [str(free_port()) for _ in range(count)]


def test_a_process_makes_and_aborts_communicators_in_each_generation() -> None:
    assert run(f"{BODIES}:generations", 100.0, ports=ports(3)) == [1.0, 2.0, 3.0]


def test_a_job_of_one_rank_is_entered_again(tmp_path: Path, record_property: Record) -> None:
    args = ("--steps", "5", "--device", "cuda", "--backend", "nccl")
    undisturbed = Undisturbed(lambda name: tmp_path / name)(LOOP, *args, ranks=1)
    faults = ("exception@backward:rank=0,step=3",)
    job = run_job(tmp_path / "run", LOOP, *args, ranks=1, faults=faults, limit_s=100.0)
    check_equal(undisturbed, job, faults, 5)
    record_property("incident, seconds", job.incidents[0].headline_s)
    assert job.incidents[0].respawned == ()


@several
def test_ranks_make_and_abort_communicators_in_each_generation() -> None:
    found = run_ranks(f"{BODIES}:generations", 2, 110.0, env=SHARED, ports=ports(3))
    assert found == [[2.0, 4.0, 6.0]] * 2


@several
def test_groups_that_wait_for_a_lost_peer_are_aborted_at_once(record_property: Record) -> None:
    found, _ = run_ranks(f"{BODIES}:lost_peer", 2, 100.0, env=SHARED, at_once=True)
    note(record_property, found)
    assert found["is stuck"]
    assert found["aborted"]
    assert found["device_s"] < 15.0


@several
def test_what_an_abort_one_by_one_would_take_is_noted(record_property: Record) -> None:
    found, _ = run_ranks(f"{BODIES}:lost_peer", 2, 100.0, env=SHARED, at_once=False)
    note(record_property, found)
    assert found["is stuck"]


@several
def test_a_vote_that_is_aborted_is_no_vote(record_property: Record) -> None:
    found, _ = run_ranks(f"{BODIES}:voting", 2, 100.0, env=SHARED)
    note(record_property, found)
    assert found["barrier waits"]
    assert found["vote waits"]
    assert found["vote"]
    assert found["vote"] != ["returned"]


@several
def test_a_rank_that_makes_a_communicator_with_a_lost_peer_is_freed(record_property: Record) -> None:
    found, _ = run_ranks(f"{BODIES}:making", 2, 100.0, env=SHARED)
    note(record_property, found)
    assert found["waits"]
    assert found["is free"]
