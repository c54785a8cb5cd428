"""Test parts in memory: they are copies, they are verified, and what is not kept is gone."""

from __future__ import annotations

import pytest
import torch

from checkpointless.local_checkpoint.content import Content
from checkpointless.local_checkpoint.memory_storage import MemoryStorage
from checkpointless.local_checkpoint.part_id import PartId, SaveId
from checkpointless.local_checkpoint.part_storage import PartError, read_any

SAVES = [SaveId(step, "0" * 24) for step in (1, 2, 3)]


def written(storage: MemoryStorage, save: SaveId = SAVES[0], part: int = 0) -> torch.Tensor:
    """Write a part with one tensor, and return that tensor."""
    tensor = torch.arange(8.0)
    storage.write([(PartId(save, part), Content.of({"weight": tensor}))], holder=0, world_size=2)
    return tensor


def test_what_was_written_is_read() -> None:
    storage = MemoryStorage()
    written(storage)
    found = read_any(storage.shelf(0, 2)[SAVES[0]][0])
    assert found is not None
    assert torch.equal(found.state()["weight"], torch.arange(8.0))


def test_a_part_is_a_copy_in_and_out() -> None:
    storage = MemoryStorage()
    written(storage).zero_()
    (copy,) = storage.shelf(0, 2)[SAVES[0]][0]
    copy.read().tensors[0].zero_()
    assert torch.equal(copy.read().tensors[0], torch.arange(8.0))


def test_a_part_that_is_taken_over_is_not_copied() -> None:
    storage = MemoryStorage(takes_over=True)
    tensor = written(storage)
    (kept,) = storage.shelf(0, 2)[SAVES[0]][0]
    assert kept.content.tensors[0].data_ptr() == tensor.data_ptr()  # type: ignore[attr-defined]


def test_a_flipped_bit_is_found() -> None:
    storage = MemoryStorage(takes_over=True)
    written(storage).view(torch.uint8)[5] ^= 1
    (copy,) = storage.shelf(0, 2)[SAVES[0]][0]
    with pytest.raises(PartError, match="part 0 of iteration 1 has changed in memory"):
        copy.verify()
    assert read_any([copy]) is None


def test_a_copy_of_the_storage_does_not_change_with_it() -> None:
    storage = MemoryStorage()
    written(storage)
    copied = storage.copy()
    written(storage, SAVES[1])
    storage.delete(SAVES[0])
    assert sorted(copied.shelf(0, 2)) == [SAVES[0]]


def test_what_is_not_kept_is_forgotten() -> None:
    storage = MemoryStorage()
    for save in SAVES:
        written(storage, save)
        written(storage, save, part=1)
    storage.delete(SAVES[1])
    assert sorted(storage.shelf(0, 2)) == [SAVES[0], SAVES[2]]
    storage.delete_all_but({SAVES[2], None})
    assert {save: sorted(parts) for save, parts in storage.shelf(0, 2).items()} == {SAVES[2]: [0, 1]}
