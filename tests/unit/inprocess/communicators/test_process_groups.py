"""Process groups of a generation: what is left of them when they are destroyed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from checkpointless.inprocess.communicators.process_groups import ProcessGroups


@pytest.fixture
def groups() -> Iterator[ProcessGroups]:
    made = ProcessGroups()
    made.install()
    yield made
    made.destroy()
    made.uninstall()


def make() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_the_name_of_a_group_that_was_being_made_is_free_again(
    groups: ProcessGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interruption in the middle of ``init_process_group``, after torch has registered the group's name."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(c10d, "_update_default_pg", interrupted)
        with pytest.raises(KeyboardInterrupt):
            make()
    assert not dist.is_initialized()
    groups.destroy()
    make()
    total = torch.ones(2)
    dist.all_reduce(total)
    assert total.tolist() == [1.0, 1.0]
