"""Test which groups share gloo's connections; `tests/ranks/test_block.py` has ranks that use such groups."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from checkpointless.inprocess.communicators.gloo_wait import _Backend
from checkpointless.inprocess.communicators.process_groups import ProcessGroups


@pytest.fixture
def groups() -> Iterator[ProcessGroups]:
    made = ProcessGroups()
    made.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield made
    made.destroy()
    made.uninstall()
    assert c10d.ProcessGroupGloo is dist.ProcessGroupGloo
    assert c10d._new_process_group_helper.__module__ == c10d.__name__
    assert not hasattr(c10d._new_process_group_helper, "__wrapped__")


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the threads that have made a backend, one entry for each."""
    made: list[str] = []
    original = _Backend._connected

    def connect(backend: Any, *args: Any, **options: Any) -> Any:
        made.append(threading.current_thread().name)
        return original(backend, *args, **options)

    monkeypatch.setattr(_Backend, "_connected", connect)
    return made


def backend_of(group: Any) -> Any:
    return group._get_backend(torch.device("cpu"))


def test_a_group_connects_once_for_all_kinds_of_devices(groups: ProcessGroups, connected: list[str]) -> None:
    first, second = dist.new_group([0]), dist.new_group([0])
    assert len(connected) == 2
    assert backend_of(first) is not backend_of(second)
    for group in (first, second):
        assert group._get_backend(torch.device("cuda")) is backend_of(group)
        dist.all_reduce(total := torch.ones(1), group=group)
        assert total.item() == 1.0


def test_groups_of_one_context_share_if_ranks_and_timeouts_are_the_same(
    groups: ProcessGroups, connected: list[str]
) -> None:
    with groups.sharing("nccl"):
        first, second = dist.new_group([0]), dist.new_group([0])
        patient = dist.new_group([0], timeout=timedelta(hours=3))
    outside = dist.new_group([0])
    with groups.sharing("gloo"):
        other = dist.new_group([0])
    with groups.sharing("nccl"):
        third = dist.new_group([0])
    made = [backend_of(each) for each in (first, patient, outside, other)]
    assert len({id(each) for each in made}) == len(connected) == 4
    assert backend_of(first) is backend_of(second) is backend_of(third)


def test_a_group_that_is_destroyed_leaves_the_others(groups: ProcessGroups) -> None:
    with groups.sharing():
        first, second = dist.new_group([0]), dist.new_group([0])
    dist.destroy_process_group(first)
    dist.all_reduce(total := torch.ones(1), group=second)
    assert total.item() == 1.0


def test_another_thread_shares_nothing_and_connects_once_too(groups: ProcessGroups, connected: list[str]) -> None:
    with groups.sharing():
        mine = dist.new_group([0])
        made: list[Any] = []
        thread = threading.Thread(target=lambda: made.append(dist.new_group([0])), name="other")
        thread.start()
        thread.join(30)
    assert connected == ["MainThread", "other"]
    assert backend_of(made[0]) is not backend_of(mine)


def test_nothing_is_shared_where_torch_looks_at_each_collective(
    groups: ProcessGroups, connected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It adds a backend to each of a group's then, on which it compares collectives before they run."""
    monkeypatch.setattr(c10d, "get_debug_level", lambda: c10d.DebugLevel.DETAIL)
    with groups.sharing():
        for _ in range(2):
            dist.new_group([0])
    assert len(connected) == 4


def test_what_was_shared_is_held_and_forgotten_with_its_generation(
    groups: ProcessGroups, connected: list[str]
) -> None:
    with groups.sharing():
        dist.destroy_process_group(dist.new_group([0]))
    (backend,) = groups._shared.backends
    groups.hold()
    references = sys.getrefcount(backend)
    groups._shared._now.among = ""  # as an interruption between two instructions would leave it
    groups.destroy()
    assert sys.getrefcount(backend) == references - 1, "it is held, so that nothing waits in its destructor"
    del backend
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    del connected[:]
    for _ in range(2):
        dist.new_group([0])
    assert len(connected) == 2
