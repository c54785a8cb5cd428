"""Stores: every bit comes back, every damage is found, and what cannot be stored safely is refused."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpointless.replication import DirectoryStore, MemoryStore, host_memory, open_store, register_store
from checkpointless.replication.host_memory import HostMemoryPool, _copy_into
from checkpointless.replication.parts import Content, Part, PartError, PartId, SaveId
from checkpointless.replication.retrieval import _usable
from checkpointless.replication.store import _FileName, _PartFile
from checkpointless.state.serialization.state_tree import StateTreeError
from tests.ranks.local_checkpoint_ranks import bits

PART = PartId(SaveId(5, "0123456789abcdef00000000"), 3)
NAME = _FileName(PART, 4, 2)
dtypes = st.sampled_from(
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.int8, torch.bool]
)


def noise(dtype: torch.dtype, shape: list[int], transposed: bool) -> torch.Tensor:
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(torch.float32).sin().to(dtype)
    return tensor.t() if transposed and tensor.dim() == 2 else tensor


tensors = st.builds(noise, dtypes, st.lists(st.integers(0, 5), max_size=3), st.booleans())
keys = st.integers() | st.text() | st.tuples(st.integers(), st.text()) | st.just("a.b")
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
trees = st.recursive(
    tensors | plain,
    lambda inner: st.lists(inner) | st.dictionaries(keys, inner) | st.lists(inner).map(tuple),
    max_leaves=12,
)
in_a_folder = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


def write(folder: Path, tree: Any) -> Path:
    DirectoryStore(folder).write(Part.sealed(PART, 4, Content.of(tree)), holder=2)
    return folder / str(NAME)


def read(path: Path, name: _FileName = NAME) -> Part:
    return _PartFile(path, name).read()


@in_a_folder
@given(tree=trees)
def test_every_tree_comes_back_with_all_its_bits(tmp_path: Path, tree: Any) -> None:
    assert bits(read(write(tmp_path, tree)).content.state()) == bits(tree)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    tree = {"weight": torch.arange(30.0), "step": torch.tensor(3), "lr": 0.1}
    return write(tmp_path_factory.mktemp("good"), tree).read_bytes()


@in_a_folder
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_found_wherever_it_is(tmp_path: Path, good: bytes, place: float, bit: int) -> None:
    damaged = bytearray(good)
    damaged[int(place * len(good))] ^= 1 << bit
    path = tmp_path / str(NAME)
    path.write_bytes(damaged)
    with pytest.raises(PartError, match=re.escape(str(NAME))):
        read(path)


@in_a_folder
@given(place=st.floats(0, 1, exclude_max=True))
def test_a_file_that_is_cut_off_is_found(tmp_path: Path, good: bytes, place: float) -> None:
    path = tmp_path / str(NAME)
    path.write_bytes(good[: int(place * len(good))])
    with pytest.raises(PartError, match="truncated"):
        read(path)


def test_a_file_under_the_name_of_another_part_is_refused(tmp_path: Path, good: bytes) -> None:
    for name in (_FileName(PartId(PART.save, 1), 4, 2), _FileName(PART, 8, 2)):
        path = tmp_path / str(name)
        path.write_bytes(good)
        with pytest.raises(PartError, match=r"part_3 of 4 ranks, and not what its name says"):
            read(path, name)


WRONG_SHAPES: list[object] = [[1.5], ["3"], [2**63], [-1, -10], [2**62], [2**32, 2**32], [2**62, 2**62, 0]]
WRONG_SHAPES += [[1] * 100, [True], 3]


@pytest.mark.parametrize(
    ("field", "value"),
    [("tensors", [["float32", shape, 1]]) for shape in WRONG_SHAPES]
    + [("tensors", value) for value in ([["float32", []]], [["nonsense", [], 1]], [[["a"], [], 1]], 5, {"a": 1})]
    + [("world_size", value) for value in (float("inf"), 4.5, "4", -1, 2**63, None)]
    + [("structure", 7), ("id", 7), ("id", "x"), ("more", 1)],
)
def test_a_sealed_header_of_any_other_shape_is_refused(tmp_path: Path, field: str, value: Any) -> None:
    header = {"id": str(PART), "world_size": 4, "structure": b"", "tensors": []} | {field: value}
    packed = msgspec.msgpack.encode(header)
    path = tmp_path / str(NAME)
    digest = xxhash.xxh3_64_intdigest(packed)
    path.write_bytes(b"CKPTPRT3" + len(packed).to_bytes(8, "little") + digest.to_bytes(8, "little") + packed)
    with pytest.raises(PartError, match=re.escape(str(NAME))):
        read(path)


saves = st.builds(SaveId, st.integers(0, 10**12), st.text("0123456789abcdef", min_size=24, max_size=24))


@given(save=saves, part=st.integers(0, 10**6), holder=st.integers(0, 10**6), finished=...)
def test_names(save: SaveId, part: int, holder: int, finished: bool) -> None:
    name = _FileName(PartId(save, part), holder + 1, holder)
    assert PartId.parse(str(name.id)) == name.id
    assert _FileName.parse(str(name) if finished else name.unfinished) == (name, finished)


@pytest.mark.parametrize(
    "tree", [("tensor",), (0, "tensor"), ("a", "tuple"), {"t": "tensor", "v": 0}, [(torch.ones(2), "tensor")]]
)
def test_what_looks_like_a_reference_to_a_tensor_is_none(tree: Any) -> None:
    assert bits(Content.of(tree).state()) == bits(tree)


class Sharded(torch.Tensor):
    """Represents a tensor that is more than its memory, as a DTensor is."""


@pytest.mark.parametrize(
    "intruder",
    [
        object(),
        torch.ones(2).to_sparse(),
        torch.ones(2, device="meta"),
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
        torch.ones(1).as_subclass(Sharded),
    ],
)
def test_what_cannot_be_stored_is_refused_with_its_path(intruder: Any) -> None:
    with pytest.raises(StateTreeError, match=r"state\['callbacks'\]\[1\]\['EMA'\]"):
        Content.of({"callbacks": (0, {"EMA": intruder})})


# --- Parts in memory are copies and verified, and places have names -----------------------------------------------

FIRST = SaveId(1, "0" * 24)


def write_part(store: MemoryStore) -> torch.Tensor:
    given = Content.of({"weight": torch.arange(8.0)})
    store.write(Part.sealed(PartId(FIRST, 0), 2, given), holder=0)
    return given.tensors[0]


def weight(store: MemoryStore, is_shared: bool = False) -> torch.Tensor:
    (copy,) = store.shelf(2)[FIRST][0]
    (tensor,) = copy.read(is_shared).content.tensors
    return tensor


def test_a_part_is_a_copy_in_and_out() -> None:
    store = MemoryStore()
    write_part(store).zero_()
    weight(store).zero_()
    assert torch.equal(weight(store), torch.arange(8.0))


def test_a_flipped_bit_is_found(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    write_part(store)
    weight(store, is_shared=True).view(torch.uint8)[5] ^= 1
    (copy,) = store.shelf(2)[FIRST][0]
    with pytest.raises(PartError, match="part 0 of iteration 1 is damaged: tensor 0 has another digest"):
        copy.read()
    assert _usable(lambda each: each.read(), copy) is None
    assert "taken for missing" in caplog.text


def test_a_place_is_opened_by_its_scheme_or_is_a_directory(tmp_path: Path) -> None:
    open_ = Mock()
    register_store("test-memory", open_)
    assert open_store("test-memory://bucket/copies", "job-1") is open_.return_value
    open_.assert_called_once_with("bucket/copies/job-1")
    store = open_store(tmp_path, "job-1", "rank-0")
    assert isinstance(store, DirectoryStore)
    assert store.root == tmp_path / "job-1" / "rank-0"
    with pytest.raises(ValueError, match="no store is known for s3://: call register_store"):
        open_store("s3://bucket")


def test_memory_is_used_again_when_nobody_holds_what_lies_in_it() -> None:
    pool = HostMemoryPool()
    first, second = (pool.content(b"", [torch.empty(1 << 20)]) for _ in range(2))
    place = first.tensors[0].data_ptr()
    assert second.tensors[0].data_ptr() != place
    del first
    assert pool.content(b"", [torch.empty(1 << 20)]).tensors[0].data_ptr() == place


def test_a_part_that_is_received_gives_the_same_tensors() -> None:
    given = Content(b"any", (torch.randn(7, 5).t(), torch.tensor(3), torch.empty(0)))
    sent = Part.sealed(PartId(FIRST, 1), 2, given)
    room = Part.described(sent.header(), HostMemoryPool().content)
    _copy_into(room.content, sent.content.tensors, None)
    room.verify()
    assert (room.id, room.world_size, room.content.structure) == (sent.id, 2, b"any")
    assert all(map(torch.equal, room.content.tensors, sent.content.tensors))
    with pytest.raises(PartError, match="the header of a part cannot be read"):
        Part.described(b"nothing", HostMemoryPool().content)


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
