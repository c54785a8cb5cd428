"""Check that every bit of a local checkpoint's file comes back, and that every damage is found."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpointless.local_checkpoint.content import Content
from checkpointless.local_checkpoint.part_file import (
    PartFileError,
    PartName,
    part_world_size,
    read_part,
    verify_part,
    write_part,
)
from checkpointless.local_checkpoint.part_id import PartId, SaveId
from checkpointless.serialization import state_tree
from tests.ranks.local_checkpoint_ranks import bits

PART = PartId(SaveId(5, "0123456789abcdef00000000"), 3)
NAME = PartName(PART, 2, finished=True)
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


@in_a_folder
@given(tree=trees)
def test_every_tree_comes_back_with_all_its_bits(tmp_path: Path, tree: Any) -> None:
    path = write_part(tmp_path, NAME, 8, Content.of(tree))
    verify_part(path)
    assert part_world_size(path) == 8
    assert bits(read_part(path).state()) == bits(tree)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the bytes of an undamaged part file."""
    tree = {"weight": torch.arange(30.0), "step": torch.tensor(3), "lr": 0.1}
    return write_part(tmp_path_factory.mktemp("good"), NAME, 4, Content.of(tree)).read_bytes()


@in_a_folder
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_found_wherever_it_is(tmp_path: Path, good: bytes, place: float, bit: int) -> None:
    damaged = bytearray(good)
    damaged[int(place * len(good))] ^= 1 << bit
    path = tmp_path / NAME.file
    path.write_bytes(damaged)
    with pytest.raises(PartFileError, match=re.escape(NAME.file)):
        verify_part(path)
    with pytest.raises(PartFileError):
        read_part(path)


@in_a_folder
@given(place=st.floats(0, 1, exclude_max=True))
def test_a_file_that_is_cut_off_is_found_by_its_seal(tmp_path: Path, good: bytes, place: float) -> None:
    path = tmp_path / NAME.file
    path.write_bytes(good[: int(place * len(good))])
    with pytest.raises(PartFileError):
        part_world_size(path)


@pytest.mark.parametrize("change", [lambda data: data + b"\0", lambda data: b"\0" + data, lambda data: data * 2])
def test_more_than_the_file_is_not_the_file(tmp_path: Path, good: bytes, change: Callable[[bytes], bytes]) -> None:
    path = tmp_path / NAME.file
    path.write_bytes(change(good))
    with pytest.raises(PartFileError):
        verify_part(path)


def test_a_file_under_the_name_of_another_part_is_refused(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / PartName(PartId(PART.save, 1), 2, finished=True).file
    path.write_bytes(good)
    with pytest.raises(PartFileError, match=r"part 3 of iteration 5 .* and not what its name says"):
        part_world_size(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tensors", [["float32", shape]])
        for shape in (
            [1.5],
            ["3"],
            [2**64],
            [-1, -10],
            [2**62],
            [2**32, 2**32],
            [2**62, 2**62, 0],
            [1] * 100,
            [True],
            3,
        )
    ]
    + [("tensors", value) for value in ([["float32"]], [["nonsense", []]], [[["a"], []]], 5, {"a": 1})]
    + [("world_size", value) for value in (float("inf"), 4.0, "4", -1, 2**70, None)]
    + [("structure", "text"), ("structure", 7), ("form", 7), ("id", 7), ("id", "x"), ("more", 1)],
)
def test_a_sealed_header_of_any_other_shape_is_refused(tmp_path: Path, field: str, value: Any) -> None:
    header = {"id": str(PART), "world_size": 4, "form": "", "structure": b"", "tensors": []} | {field: value}
    packed = state_tree.dumps(header)
    digests = bytes(8 * len(value)) if field == "tensors" and isinstance(value, list) else b""
    preface = b"CKPTPRT1" + len(packed).to_bytes(8, "little") + packed
    seal = (len(digests) // 8).to_bytes(8, "little") + xxhash.xxh3_64(preface + digests).digest()[::-1]
    path = tmp_path / NAME.file
    path.write_bytes(preface + digests + seal)
    for read in (part_world_size, verify_part, read_part):
        with pytest.raises(PartFileError, match=re.escape(NAME.file)):
            read(path)


def test_the_header_is_where_it_is_said_to_be(good: bytes) -> None:
    assert good.startswith(b"CKPTPRT1")
    length = int.from_bytes(good[8:16], "little")
    tensors = good[16 + length : 16 + length + 30 * 4 + 8]
    assert torch.frombuffer(bytearray(tensors[:120]), dtype=torch.float32).tolist() == list(range(30))
    assert int.from_bytes(tensors[120:], "little") == 3
    assert int.from_bytes(good[-16:-8], "little") == 2


@given(iteration=st.integers(0, 10**12), part=st.integers(0, 10**6), holder=st.integers(0, 10**6), finished=...)
def test_names_of_files(iteration: int, part: int, holder: int, finished: bool) -> None:
    name = PartName(PartId(SaveId(iteration, "f" * 24), part), holder, finished)
    assert PartName.parse(name.file) == name
    assert PartId.parse(str(name.id)) == name.id
    assert SaveId.parse(str(name.id.save)) == name.id.save


@pytest.mark.parametrize(
    "file", ["notes.txt", f".{NAME.file}", f"{NAME.file}.tmp", "iter_5.part_3.held_2.ckpt", ""]
)
def test_files_of_others(file: str) -> None:
    assert PartName.parse(file) is None
