"""Test that a wait for gloo is interrupted wherever it stands, and that NCCL's waits stay as they are."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from checkpointless.inprocess.communicators.waits import _interruptible_wait

GIVEN_UP_S = 20.0


class Interruption(BaseException):
    """Stands for the interruption of a block."""


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)


def pair() -> list[Any]:
    """Return two ranks of a gloo group, both in this process."""
    store, limit = dist.HashStore(), timedelta(seconds=GIVEN_UP_S)
    with ThreadPoolExecutor(2) as ranks:
        return list(ranks.map(lambda rank: c10d.ProcessGroupGloo(store, rank, 2, limit), range(2)))


@pytest.mark.parametrize("collective", ["allreduce", "barrier"])
def test_a_wait_for_a_rank_that_does_not_come_is_interrupted_where_there_is_cuda(
    on_a_gpu: None, collective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = pair()
    monkeypatch.setattr(c10d.Work, "wait", _interruptible_wait(c10d.Work.wait))

    def interrupt(number: int, frame: object) -> None:
        raise Interruption

    before = signal.signal(signal.SIGALRM, interrupt)
    began_s = time.monotonic()
    tensors = [torch.ones(2)]
    try:
        work = ranks[0].allreduce(tensors) if collective == "allreduce" else ranks[0].barrier()
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(Interruption):
            work.wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began_s < GIVEN_UP_S / 2
    late = ranks[1].allreduce([torch.ones(2)]) if collective == "allreduce" else ranks[1].barrier()
    late.wait()
    work.wait()
    assert tensors[0].tolist() == ([2.0, 2.0] if collective == "allreduce" else [1.0, 1.0])


class WorkOfNCCL:
    """Stands in for a work of NCCL's, which has a future for its result."""

    def __init__(self) -> None:
        self.waits: list[tuple[Any, ...]] = []

    def get_future_result(self) -> object:
        """Return a future, as no other backend does."""
        return object()

    def is_completed(self) -> bool:
        """Return that it still runs."""
        return False

    def _get_op_type(self) -> int:
        return 1


def test_a_wait_of_nccl_has_no_time_limit_that_would_abort_its_communicator(on_a_gpu: None) -> None:
    def wait(work: WorkOfNCCL, *timeout: timedelta) -> bool:
        work.waits.append(timeout)
        return True

    work: Any = WorkOfNCCL()
    assert _interruptible_wait(wait)(work)
    assert work.waits == [()]
