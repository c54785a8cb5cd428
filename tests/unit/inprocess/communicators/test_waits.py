"""Test that making a group and waiting for gloo can be interrupted, and that NCCL's waits stay as they are."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from checkpointless.inprocess.communicators.waits import _interruptible_wait, _InterruptibleGloo
from checkpointless.inprocess.exceptions import RankShouldRestart
from checkpointless.inprocess.fault_responder import MainThread

ONE_S = 1.0
c10d: Any = distributed_c10d  # Any: the tests replace its class


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def replace(original: Any = dist.ProcessGroupGloo) -> None:
        monkeypatch.setattr(c10d, "ProcessGroupGloo", _InterruptibleGloo(original))

    return replace


GIVEN_UP_S = 20.0


def pair(given_up_s: float = GIVEN_UP_S) -> list[Any]:
    store, limit = dist.HashStore(), timedelta(seconds=given_up_s)
    with ThreadPoolExecutor(2) as ranks:
        return list(ranks.map(lambda rank: c10d.ProcessGroupGloo(store, rank, 2, timeout=limit), range(2)))


@pytest.fixture
def main() -> Iterator[MainThread]:
    made = MainThread()
    yield made
    made.close()


class Waits:
    """Stands in for gloo's class: it waits in C, where no interruption is handled."""

    def __init__(self, seconds: float) -> None:
        time.sleep(seconds)


def test_the_main_thread_leaves_while_gloo_still_waits(install: Callable[..., None], main: MainThread) -> None:
    install(Waits)
    places: list[tuple[bool, str]] = []

    def interrupt() -> None:
        time.sleep(ONE_S)
        places.append(main.where())
        main.interrupt_until_left(60.0, lambda _: None)

    thread = threading.Thread(target=interrupt)
    thread.start()
    began = time.monotonic()
    with pytest.raises(RankShouldRestart):
        main.run(lambda: c10d.ProcessGroupGloo(30.0))
    assert time.monotonic() - began < 25.0
    thread.join()
    assert [is_in_collective for is_in_collective, _ in places] == [True], "who waits for peers is no culprit"


def test_torch_knows_the_groups_of_the_class_and_the_class_its_members(install: Callable[..., None]) -> None:
    original = dist.ProcessGroupGloo
    install()
    made = c10d.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=c10d.default_pg_timeout)
    assert type(made) is original
    assert [isinstance(each, c10d.ProcessGroupGloo) for each in (made, install)] == [True, False]
    assert issubclass(original, c10d.ProcessGroupGloo)
    assert c10d.ProcessGroupGloo.__name__ == original.__name__


def test_an_error_is_raised_where_the_group_was_to_be_made(install: Callable[..., None]) -> None:
    install()
    with pytest.raises(TypeError, match="no store"):
        c10d.ProcessGroupGloo("no store")


def test_a_forked_process_makes_a_helper_of_its_own(install: Callable[..., None]) -> None:
    install(Waits)
    c10d.ProcessGroupGloo(0.0)
    pid = os.fork()
    if pid == 0:
        try:
            c10d.ProcessGroupGloo(0.0)
            os._exit(0)
        finally:
            os._exit(1)
    deadline = time.monotonic() + 30
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            pytest.fail("it waits for a thread that is not there")
        time.sleep(0.01)
    assert ended[1] == 0


@pytest.mark.parametrize("asked", ["1", "true", "Yes"])
def test_two_ranks_are_connected_when_their_group_has_been_made(
    install: Callable[..., None], asked: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What gloo connects at the first message cannot be cut."""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", asked)
    install()
    before = established()
    made = pair(60.0)
    assert len(established() - before) == 2
    assert f"TORCH_GLOO_LAZY_INIT={asked} is ignored" in caplog.text
    caplog.clear()
    made.append(c10d.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=timedelta(seconds=60)))
    assert caplog.text == "", "it is said once"


def established() -> set[tuple[Any, ...]]:
    found = psutil.Process().net_connections("tcp")
    return {(each.laddr, each.raddr) for each in found if each.status == psutil.CONN_ESTABLISHED}


class Interruption(BaseException):
    """Stands for the interruption of a block."""


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)


@pytest.mark.parametrize("collective", ["allreduce", "barrier"])
def test_a_wait_for_a_rank_that_does_not_come_is_interrupted_where_there_is_cuda(
    on_a_gpu: None, collective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = pair()
    monkeypatch.setattr(c10d.Work, "wait", _interruptible_wait(c10d.Work.wait))

    before = signal.signal(signal.SIGALRM, Mock(side_effect=Interruption))
    began_s = time.monotonic()
    tensors = [torch.ones(2)]
    arguments = [tensors] if collective == "allreduce" else []
    try:
        work = getattr(ranks[0], collective)(*arguments)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(Interruption):
            work.wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began_s < GIVEN_UP_S / 2
    getattr(ranks[1], collective)(*([[torch.ones(2)]] if arguments else [])).wait()
    work.wait()
    assert tensors[0].tolist() == ([2.0, 2.0] if arguments else [1.0, 1.0])


def test_a_wait_of_nccl_has_no_time_limit_that_would_abort_its_communicator(on_a_gpu: None) -> None:
    work, wait = Mock(), Mock(return_value=True)
    work.is_completed.return_value, work._get_op_type.return_value = False, 1
    assert _interruptible_wait(wait)(work)
    wait.assert_called_once_with(work)
