"""Sends and receives are counted by pair, the same at both ends."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from checkpointless.inprocess.communicators.process_groups import _ProcessGroups


class Group:
    """Stands in for a group of torch's, with only what is asked of it.

    Args:
        rank: this rank's in the group.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        names: Any = c10d._world.pg_names
        names[self] = "4"
        self.done: list[tuple[str, int, int]] = []

    def rank(self) -> int:
        return self._rank


@pytest.fixture(autouse=True)
def _names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c10d, "_world", type("World", (), {"pg_names": {}}))


@pytest.fixture
def torchs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return torch's class, whose methods only note their calls."""
    for name in ("send", "recv"):

        def method(group: Group, tensors: Any, peer: int, tag: int, name: str = name) -> str:
            group.done.append((name, peer, tag))
            return f"the work of a {name}"

        monkeypatch.setattr(dist.ProcessGroup, name, method)
    return dist.ProcessGroup


def test_both_ends_count_the_same(torchs: Any) -> None:
    ends = []
    for rank, peer, name in ((0, 2, "send"), (2, 0, "recv")):
        groups, group = _ProcessGroups(), Group(rank)
        counting = functools.partial(groups.counting, name == "send")
        for _ in range(3):
            assert counting(getattr(torchs, name))(group, [], peer, 7) == f"the work of a {name}"
        assert group.done == [(name, peer, 7)] * 3
        ends.append(dict(groups.messages))
    assert ends == [{"4/0>2": 3}] * 2
