"""Check that every bit of a local checkpoint's file comes back, and that every damage is found."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpointless.replication.parts import Content, Part, PartError, PartId, SaveId
from checkpointless.replication.store import DirectoryStore, _FileName, _PartFile
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
    assert bits(_PartFile(write(tmp_path, tree), NAME).read().content.state()) == bits(tree)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the bytes of an undamaged part file."""
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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tensors", [["float32", shape, 1]])
        for shape in (
            [1.5],
            ["3"],
            [2**63],
            [-1, -10],
            [2**62],
            [2**32, 2**32],
            [2**62, 2**62, 0],
            [1] * 100,
            [True],
            3,
        )
    ]
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


@given(iteration=st.integers(0, 10**12), part=st.integers(0, 10**6), holder=st.integers(0, 10**6), finished=...)
def test_names_of_files(iteration: int, part: int, holder: int, finished: bool) -> None:
    name = _FileName(PartId(SaveId(iteration, "f" * 24), part), holder + 1, holder)
    assert _FileName.parse(str(name) if finished else name.unfinished) == (name, finished)
