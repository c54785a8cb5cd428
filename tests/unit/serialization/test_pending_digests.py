"""Test that digests come back in order, and that the device is waited for once."""

from __future__ import annotations

import pytest
import torch

from checkpointless.state.serialization import digest
from checkpointless.state.serialization.digest import (
    MemoryChecksumManager,
    PendingDigests,
    _digest_on_device,
    digest_bytes,
)

PARTS = [torch.arange(count, dtype=torch.uint8) for count in (0, 1, 8, 100)]


@pytest.fixture
def fetches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Take everything for bytes on a device, and count what waits for it, with the number of digests fetched."""
    found: list[int] = []
    tolist = torch.Tensor.tolist

    def counting(tensor: torch.Tensor) -> list[int]:
        found.append(tensor.numel())
        return tolist(tensor)

    monkeypatch.setattr(digest, "is_on_host", lambda flat: False)
    monkeypatch.setattr(torch.Tensor, "tolist", counting)
    monkeypatch.setattr(torch.Tensor, "item", None)
    return found


def test_on_the_host_they_are_those_of_each() -> None:
    pending = PendingDigests()
    for part in PARTS:
        pending.add(part)
    pending.add_known(7)
    assert pending.fetch() == [*map(digest_bytes, PARTS), 7]


def test_those_of_a_device_are_fetched_at_once(fetches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    pending = PendingDigests()
    pending.add_known(7)
    for part in PARTS:
        pending.add(part)
    assert fetches == []
    found = pending.fetch()
    assert fetches == [len(PARTS)]
    monkeypatch.undo()
    assert found == [7, *map(_digest_on_device, PARTS)]


def test_bytes_that_change_later_are_digested_as_they_were(fetches: list[int]) -> None:
    part = torch.arange(20, dtype=torch.uint8)
    pending = PendingDigests()
    pending.add(part)
    part += 1
    pending.add(part)
    one, other = pending.fetch()
    assert one != other


def test_nothing_waits_for_nothing(fetches: list[int]) -> None:
    pending = PendingDigests()
    assert pending.fetch() == []
    pending.add_known(1)
    assert pending.fetch() == [1]
    assert fetches == []


def test_many_tensors_are_one_wait(fetches: list[int]) -> None:
    tensors = {(index,): part for index, part in enumerate(PARTS)}
    found = MemoryChecksumManager().digest_each(tensors)
    assert fetches == [len(PARTS)]
    assert len(set(found.values())) == len(found) == len(PARTS)
