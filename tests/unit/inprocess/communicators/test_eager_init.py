"""Test that NCCL's groups are bound to the rank's device where the user asks for it, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from checkpointless.environment import EAGER_INIT_ENV
from checkpointless.inprocess.communicators.process_groups import EagerInit


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Install it on a machine with GPUs, and return what torch's function is given."""
    given: list[dict[str, Any]] = []

    def init(backend: str | None = None, init_method: str | None = None, **options: Any) -> None:
        given.append({"backend": backend, "init_method": init_method, **options})

    for module in (c10d, dist):
        monkeypatch.setattr(module, "init_process_group", init)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setenv(EAGER_INIT_ENV, "1")
    eager = EagerInit()
    eager.install()
    yield given
    eager.uninstall()
    assert dist.init_process_group is init
    assert c10d.init_process_group is init


@pytest.mark.parametrize("backend", [None, "nccl", "cpu:gloo,cuda:nccl"])
def test_groups_of_nccl_are_bound_to_the_device_of_the_rank(
    calls: list[dict[str, Any]], backend: str | None
) -> None:
    dist.init_process_group(backend, "env://", rank=1, world_size=2)
    device = torch.device("cuda", 3)
    expected = {"backend": backend, "init_method": "env://", "rank": 1, "world_size": 2, "device_id": device}
    assert calls == [expected]


def test_groups_of_gloo_and_a_device_that_the_caller_gives_stay_as_they_are(calls: list[dict[str, Any]]) -> None:
    dist.init_process_group("gloo")
    c10d.init_process_group("nccl", device_id=torch.device("cuda", 5))
    assert [each["device_id"] for each in calls] == [None, torch.device("cuda", 5)]


@pytest.mark.parametrize(("asked", "has_nccl"), [(False, True), (True, False)])
def test_torchs_function_stays_where_nobody_asks_or_there_is_no_nccl(
    monkeypatch: pytest.MonkeyPatch, asked: bool, has_nccl: bool
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: has_nccl)
    monkeypatch.setenv(EAGER_INIT_ENV, str(int(asked)))
    before = dist.init_process_group
    EagerInit().install()
    assert dist.init_process_group is before
