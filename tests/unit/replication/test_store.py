"""Test stores: parts in memory are copies and verified, what is not kept is gone, and places have names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from checkpointless.replication import DirectoryStore, MemoryStore, host_memory, open_store, register_store
from checkpointless.replication.host_memory import HostMemoryPool, _copy_into
from checkpointless.replication.parts import Content, Part, PartError, PartId, SaveId
from checkpointless.replication.retrieval import _usable

SAVES = [SaveId(step, "0" * 24) for step in (1, 2, 3)]


def content() -> Content:
    return Content.of({"weight": torch.arange(8.0)})


def written(
    store: MemoryStore, save: SaveId = SAVES[0], part: int = 0, given: Content | None = None
) -> torch.Tensor:
    """Write a part with one tensor, and return that tensor."""
    given = content() if given is None else given
    store.write(Part.sealed(PartId(save, part), 2, given), holder=0)
    return given.tensors[0]


def weight(store: MemoryStore, is_shared: bool = False) -> torch.Tensor:
    (copy,) = store.shelf(2)[SAVES[0]][0]
    (tensor,) = copy.read(is_shared).content.tensors
    return tensor


def test_a_part_is_a_copy_in_and_out() -> None:
    store = MemoryStore()
    written(store).zero_()
    weight(store).zero_()
    assert torch.equal(weight(store), torch.arange(8.0))


def test_a_flipped_bit_is_found(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    written(store)
    weight(store, is_shared=True).view(torch.uint8)[5] ^= 1
    (copy,) = store.shelf(2)[SAVES[0]][0]
    with pytest.raises(PartError, match="part 0 of iteration 1 is damaged: tensor 0 has another digest"):
        copy.read()
    assert _usable(lambda each: each.read(), copy) is None
    assert "taken for missing" in caplog.text


def test_a_place_is_opened_by_its_scheme_or_is_a_directory(tmp_path: Path) -> None:
    opened = []

    def open_(name: str) -> MemoryStore:
        opened.append(name)
        return MemoryStore()

    register_store("test-memory", open_)
    assert isinstance(open_store("test-memory://bucket/copies", "job-1"), MemoryStore)
    assert opened == ["bucket/copies/job-1"]
    store = open_store(tmp_path, "job-1", "rank-0")
    assert isinstance(store, DirectoryStore)
    assert store.root == tmp_path / "job-1" / "rank-0"
    with pytest.raises(ValueError, match="no store is known for s3://: call register_store"):
        open_store("s3://bucket")


# --- memory that is used again ------------------------------------------------------------------------------------


def test_memory_is_used_again_when_nobody_holds_what_lies_in_it() -> None:
    pool = HostMemoryPool()
    first = pool.content(b"", [torch.empty(1 << 20)])
    place = first.tensors[0].data_ptr()
    second = pool.content(b"", [torch.empty(1 << 20)])
    assert second.tensors[0].data_ptr() != place
    del first
    assert pool.content(b"", [torch.empty(1 << 20)]).tensors[0].data_ptr() == place


def test_a_part_that_is_received_gives_the_same_tensors() -> None:
    sent = Part.sealed(
        PartId(SAVES[0], 1), 2, Content(b"any", (torch.randn(7, 5).t(), torch.tensor(3), torch.empty(0)))
    )
    room = HostMemoryPool().room_for(sent.header())
    _copy_into(room.content, sent.content.tensors, None)
    room.verify()
    assert (room.id, room.world_size, room.content.structure) == (sent.id, 2, b"any")
    assert all(map(torch.equal, room.content.tensors, sent.content.tensors))
    with pytest.raises(PartError, match="the header of a part cannot be read"):
        HostMemoryPool().room_for(b"nothing")


def test_pages_are_locked_as_long_as_a_content_or_the_pool_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: set[int] = set()

    def lock(memory: torch.Tensor) -> bool:
        locked.add(memory.data_ptr())
        return True

    monkeypatch.setattr(host_memory, "_lock_pages", lock)
    monkeypatch.setattr(host_memory, "_unlock_pages", lambda memory, _: locked.remove(memory.data_ptr()))
    pool = HostMemoryPool()
    kept, spare = (pool.content(b"x", [torch.zeros(8)]) for _ in range(2))
    assert len(locked) == 2
    del pool, spare
    assert locked == {kept.tensors[0].data_ptr()}
    del kept
    assert not locked


def test_a_process_ends_without_a_word_about_pages_that_are_locked() -> None:
    code = (
        "import torch\n"
        "from checkpointless.replication import host_memory\n"
        "host_memory._lock_pages = lambda memory: True\n"
        "pool = host_memory.HostMemoryPool()\n"
        "held = pool.content(b'', [torch.zeros(8)])\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert ended.stderr == ""
