"""Test groups that a helper thread makes: the main thread can be interrupted, and torch sees the same class."""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from checkpointless.inprocess.block.main_thread import MainThread
from checkpointless.inprocess.communicators.gloo_wait import InterruptibleConnect
from checkpointless.inprocess.communicators.helper_thread import HelperThread
from checkpointless.inprocess.communicators.shared_backends import SharedBackends
from checkpointless.inprocess.exceptions import RankShouldRestart

ONE_S = 1.0
c10d: Any = distributed_c10d  # Any: the tests replace its class


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Iterator[InterruptibleConnect]:
    made = InterruptibleConnect(SharedBackends())
    monkeypatch.setattr(c10d, "ProcessGroupGloo", dist.ProcessGroupGloo)  # this is restored last
    yield made
    made.uninstall()


@pytest.fixture
def main() -> Iterator[MainThread]:
    made = MainThread()
    yield made
    made.close()


class Waits:
    """Stands in for gloo's class: it waits in C, where no interruption is handled."""

    def __init__(self, seconds: float) -> None:
        self.made_in = threading.current_thread()
        time.sleep(seconds)


def test_the_main_thread_leaves_while_gloo_still_waits(
    connect: InterruptibleConnect, main: MainThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(c10d, "ProcessGroupGloo", Waits)
    connect.install()
    places: list[tuple[bool, str]] = []

    def interrupt() -> None:
        time.sleep(ONE_S)
        places.append(main.where())
        main.interrupt_until_left(60.0, lambda: None)

    thread = threading.Thread(target=interrupt)
    thread.start()
    began = time.monotonic()
    with pytest.raises(RankShouldRestart):
        main.run(lambda: c10d.ProcessGroupGloo(30.0))
    assert time.monotonic() - began < 25.0
    thread.join()
    assert [is_in_collective for is_in_collective, _ in places] == [True], "who waits for peers is no culprit"


def test_torch_knows_the_groups_of_the_class_and_the_class_its_members(connect: InterruptibleConnect) -> None:
    original = dist.ProcessGroupGloo
    connect.install()
    made = c10d.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=c10d.default_pg_timeout)
    assert type(made) is original
    assert isinstance(made, c10d.ProcessGroupGloo)
    assert not isinstance(connect, c10d.ProcessGroupGloo)
    assert issubclass(original, c10d.ProcessGroupGloo)
    assert c10d.ProcessGroupGloo.__name__ == original.__name__
    connect.uninstall()
    assert c10d.ProcessGroupGloo is original


def test_an_error_is_raised_where_the_group_was_to_be_made(connect: InterruptibleConnect) -> None:
    connect.install()
    with pytest.raises(TypeError, match="no store"):
        c10d.ProcessGroupGloo("no store")


def test_one_helper_makes_all_groups_and_ends(
    connect: InterruptibleConnect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(c10d, "ProcessGroupGloo", Waits)
    connect.install()
    makers = {c10d.ProcessGroupGloo(0.0).made_in for _ in range(20)}
    assert len(makers) == 1
    assert makers != {threading.current_thread()}
    connect.uninstall()
    (maker,) = makers
    maker.join(30)
    assert not maker.is_alive()


def test_other_threads_make_their_groups_themselves(
    connect: InterruptibleConnect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(c10d, "ProcessGroupGloo", Waits)
    connect.install()
    made: list[Waits] = []
    thread = threading.Thread(target=lambda: made.append(c10d.ProcessGroupGloo(0.0)))
    thread.start()
    thread.join()
    assert [each.made_in for each in made] == [thread]


def test_a_forked_process_makes_a_helper_of_its_own(
    connect: InterruptibleConnect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(c10d, "ProcessGroupGloo", Waits)
    connect.install()
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


def test_a_helper_that_nobody_refers_to_ends() -> None:
    """An interruption may come between its start and the first use."""
    thread = HelperThread()._thread
    thread.join(30)
    assert not thread.is_alive()


def test_a_copy_of_the_class_is_the_class(connect: InterruptibleConnect) -> None:
    connect.install()
    assert copy.copy(c10d.ProcessGroupGloo).__name__ == "ProcessGroupGloo"


@pytest.mark.parametrize("asked", ["1", "true", "Yes"])
def test_two_ranks_are_connected_when_their_group_has_been_made(
    connect: InterruptibleConnect, asked: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What gloo connects at the first message cannot be cut."""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", asked)
    connect.install()
    store, before, limit = dist.HashStore(), established(), timedelta(seconds=60)
    with ThreadPoolExecutor(2) as ranks:
        made = list(ranks.map(lambda rank: c10d.ProcessGroupGloo(store, rank, 2, timeout=limit), (0, 1)))
    assert len(established() - before) == 2
    assert f"TORCH_GLOO_LAZY_INIT={asked} is not used" in caplog.text
    caplog.clear()
    made.append(c10d.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=limit))
    assert caplog.text == "", "it is said once"


@pytest.mark.parametrize("asked", [None, "0"])
def test_nothing_is_said_of_groups_that_connect_at_once(
    connect: InterruptibleConnect,
    asked: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
    if asked is not None:
        monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", asked)
    connect.install()
    c10d.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=c10d.default_pg_timeout)
    assert os.environ.get("TORCH_GLOO_LAZY_INIT") == asked
    assert caplog.text == ""


def established() -> set[tuple[Any, ...]]:
    """Return both ends of each of this process's connections."""
    found = psutil.Process().net_connections("tcp")
    return {(each.laddr, each.raddr) for each in found if each.status == psutil.CONN_ESTABLISHED}
