"""Memory of copies is used again when no save and no writer needs it any more, and not before."""

from __future__ import annotations

import torch

from checkpointless.local_checkpoint.part_id import SaveId
from checkpointless.megatron.dist_checkpoint.copies import ReusedMemory

SAVES = [SaveId(number, "0" * 24) for number in range(4)]
LIKE = torch.zeros(5, 3, dtype=torch.bfloat16)


def test_a_save_that_has_ended_leaves_its_memory_to_later_ones() -> None:
    memory = ReusedMemory()
    first, second = memory.take(SAVES[0], LIKE), memory.take(SAVES[1], LIKE)
    assert first.data_ptr() != second.data_ptr()
    memory.ended(SAVES[0])
    memory.free_all_but((SAVES[1], SAVES[2]))
    third = memory.take(SAVES[2], LIKE)
    assert third.data_ptr() == first.data_ptr()
    assert (third.dtype, third.shape, third.device.type) == (LIKE.dtype, LIKE.shape, "cpu")
    assert memory.take(SAVES[2], torch.zeros(3, 5, dtype=torch.bfloat16)).shape == (3, 5)


def test_what_is_kept_or_still_being_written_is_left_alone() -> None:
    memory = ReusedMemory()
    used = [memory.take(save, LIKE) for save in SAVES[:2]]
    memory.ended(SAVES[0])
    memory.free_all_but((SAVES[0], SAVES[2]))
    assert memory.take(SAVES[2], LIKE).data_ptr() not in {each.data_ptr() for each in used}


def test_memory_that_nobody_took_is_given_back() -> None:
    memory = ReusedMemory()
    memory.take(SAVES[0], LIKE)
    memory.ended(SAVES[0])
    memory.free_all_but(())
    memory.free_all_but(())
    assert not memory._free
    assert not memory._of
