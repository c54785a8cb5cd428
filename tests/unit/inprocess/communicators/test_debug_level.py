"""Test that groups are not wrapped in those that compare what all ranks do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from checkpointless.inprocess.communicators.debug_level import DebugLevel


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = dist.get_debug_level()
    yield
    dist.set_debug_level(before)


def test_detail_is_taken_for_info_until_the_end(caplog: pytest.LogCaptureFixture) -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    level = DebugLevel()
    level.install()
    level.install()
    assert dist.get_debug_level() == dist.DebugLevel.INFO
    assert caplog.text.count("TORCH_DISTRIBUTED_DEBUG=DETAIL is taken for INFO") == 1
    level.uninstall()
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL


@pytest.mark.parametrize("name", ["OFF", "INFO"])
def test_another_level_stays(name: str, caplog: pytest.LogCaptureFixture) -> None:
    asked = getattr(dist.DebugLevel, name)
    dist.set_debug_level(asked)
    level = DebugLevel()
    level.install()
    assert dist.get_debug_level() == asked
    level.uninstall()
    assert dist.get_debug_level() == asked
    assert caplog.text == ""
