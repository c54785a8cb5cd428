"""Test digests: the same bytes give the same one, and any damage to a tensor gives another."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.state.serialization import digest as digests
from checkpointless.state.serialization.digest import PendingDigests, digest_value, samples
from checkpointless.state.serialization.tensor_memory import tensor_bytes
from tests.drawn import examples

Digest = Callable[[torch.Tensor], int]

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.complex128,
    ),
]
SHAPES = [(), (0,), (0, 3), (1,), (7,), (3, 5), (2, 3, 4)]


def _on_device(flat: torch.Tensor) -> int:
    return int(digests._digest_on_device(flat)) % 2**64


each_digest = pytest.mark.parametrize("digest", [digests.MemoryChecksumManager().digest, _on_device])


@pytest.fixture(autouse=True, scope="module")
def _short_chunks() -> Iterator[None]:
    """Make chunks 4 lanes long, so that tensors of a few hundred bytes have several of them."""
    with mock.patch.object(digests, "CHUNK_LANES", 4):
        yield


def flat(data: bytes) -> torch.Tensor:
    """Return the bytes as a flat uint8 tensor with its own memory."""
    return torch.tensor(list(data), dtype=torch.uint8)


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return a tensor of random bytes, or of random truth values."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    made = torch.empty(shape, dtype=dtype)
    tensor_bytes(made).random_(0, 256, generator=generator)
    return made


def by_definition(data: bytes, chunk_lanes: int) -> int:
    """Return the digest of a device as its definition has it, in whole numbers of Python."""
    word = 2**64

    def mixed(lane: int, position: int) -> int:
        lane = (lane + position * 0x9E3779B97F4A7C15) % word
        lane = (lane ^ lane >> 30) * 0xBF58476D1CE4E5B9 % word
        lane = (lane ^ lane >> 27) * 0x94D049BB133111EB % word
        return lane ^ lane >> 31

    total = len(data)
    for number in range(len(data) // 8):
        lane = int.from_bytes(data[8 * number : 8 * number + 8], "little")
        total += (2 * (number // chunk_lanes) + 5) * mixed(lane, number % chunk_lanes + 1)
    tail = data[len(data) // 8 * 8 :]
    if tail:
        total += 3 * mixed(int.from_bytes(tail, "little"), 1)
    return total % word


@given(st.binary(max_size=300))
@examples(200)
def test_the_digest_of_a_device_is_as_defined(data: bytes) -> None:
    assert _on_device(flat(data)) == by_definition(data, digests.CHUNK_LANES)


@each_digest
@given(st.integers(0, 2**32), st.integers(0, 63), st.sets(st.integers(0, 15), min_size=1))
@examples(200)
def test_one_bit_flipped_in_several_lanes_changes_it(digest: Digest, seed: int, bit: int, where: set[int]) -> None:
    tensor = filled((16,), torch.int64, seed)
    damaged = tensor.clone()
    damaged[sorted(where)] ^= -(2**63) if bit == 63 else 1 << bit
    assert digest(tensor_bytes(damaged)) != digest(tensor_bytes(tensor))


@each_digest
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_dtype_and_shape(digest: Digest, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = filled(shape, dtype)
    found = digest(tensor_bytes(tensor))
    assert 0 <= found < 2**64
    assert digest(tensor_bytes(tensor.clone())) == found
    if tensor.numel():
        damaged = tensor.clone()
        tensor_bytes(damaged)[-1] ^= 1
        assert digest(tensor_bytes(damaged)) != found


@each_digest
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_with_gaps_has_the_digest_of_its_contiguous_copy(digest: Digest, dtype: torch.dtype) -> None:
    base = filled((6, 10), dtype)
    for view in (base.t(), base[:, 3:], base[::2], base[1:, ::3], base[:1].expand(4, 10)):
        assert digest(tensor_bytes(view)) == digest(tensor_bytes(view.contiguous().clone()))
    assert digest(tensor_bytes(base.t())) != digest(tensor_bytes(base))


@each_digest
@given(st.binary(max_size=100), st.integers(0, 17))
@examples(100)
def test_it_does_not_depend_on_where_the_bytes_lie(digest: Digest, data: bytes, before: int) -> None:
    assert digest(flat(bytes(before) + data)[before:]) == digest(flat(data))


@given(st.lists(st.binary(max_size=40), max_size=6))
@examples(200)
def test_parts_have_the_digest_of_the_whole(pieces: list[bytes]) -> None:
    pending = PendingDigests()
    pending.add_parts(flat(piece) for piece in pieces)
    assert pending.fetch() == [digests.MemoryChecksumManager().digest(flat(b"".join(pieces)))]


def test_the_digest_of_a_shard_is_of_keys_dtypes_shapes_and_bytes() -> None:
    manager = digests.MemoryChecksumManager()
    tensor = filled((4, 4), torch.float32)
    damaged = tensor.clone()
    tensor_bytes(damaged)[0] ^= 1
    shards: list[dict[tuple, torch.Tensor]] = [
        {("a",): tensor},
        {("b",): tensor},
        {("a", 0): tensor},
        {("a",): tensor.view(torch.int32)},
        {("a",): tensor.view(2, 8)},
        {("a",): damaged},
        {("a",): tensor, ("b",): tensor},
        {("a",): tensor, ("b",): damaged},
        {("a",): damaged, ("b",): tensor},
        {("b",): tensor, ("a",): tensor},
        {},
    ]
    found = [manager.digest_all(shard) for shard in shards]
    assert len(set(found)) == len(found)
    assert all(len(each) == 32 for each in found)
    assert manager.digest_all({("a",): tensor.clone()}) == found[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_digest_is_the_same_on_every_device() -> None:
    for length in (0, 1, 7, 8, 9, 31, 32, 33, 1000):
        tensor = filled((length,), torch.uint8)
        assert digests.MemoryChecksumManager().digest(tensor.cuda()) == _on_device(tensor)


def test_digests_that_step_files_record_stay_the_same() -> None:
    """A run that was recorded before is read by ``verify`` after."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) * 0.1 + index)
    tensor = torch.arange(37, dtype=torch.float32)
    assert digests.digest_parameters([module]) == "206cca8c0ed12e014dbacc605fa75ba7"
    assert digests.digest_buffers([module]) == "f0a7f844ee339a9f12a560b09b846a08"
    all_of = digests.MemoryChecksumManager().digest_all({("a", 1): tensor, ("b",): tensor.to(torch.bfloat16)})
    assert all_of == "52f8c2b2035c71056bcc69391b8362f7"
    assert digest_value({"b": 1, "a": (1, [2])}) == "edc24cf7d225787d8deb3ba1ba66c713"
    assert digest_value(OrderedDict(a=tensor)) == "8c8135ba42d32e7fe5b108f8489afd70"
    assert digest_value(-0.0) == "5bd1bc2cd392072df907d805a86cb36e"
    assert digest_value({"x", "y", "z"}) == "f0de5a56681c4692809237bce2ba01b6", (
        "each process orders a set in another way"
    )


# --- Samples of tensors tell those apart that hold other elements, whatever they are laid out like ----------------


TENSORS = {
    "many": torch.arange(100.0).reshape(10, 10),
    "few": torch.ones(3),
    "one": torch.tensor(2.0),
    "half": torch.full((40,), 0.5, dtype=torch.bfloat16),
    "truth": torch.tensor([True, False]),
    "turned": torch.arange(60.0).reshape(6, 10).t(),
    "part": torch.arange(90.0)[7:50],
    "expanded": torch.ones(1).expand(50),
    "trained": torch.nn.Parameter(torch.ones(4)),
}


@pytest.mark.parametrize("name", TENSORS)
def test_another_element_is_noticed_in_that_tensor_alone(name: str) -> None:
    tensors = {key: each.detach().clone(memory_format=torch.preserve_format) for key, each in TENSORS.items()}
    before = samples(tensors)
    assert before.keys() == TENSORS.keys()
    tensors[name].flatten()[:1].logical_not_() if name == "truth" else tensors[name].mul_(3).add_(1)
    after = samples(tensors)
    assert [key for key in before if before[key] != after[key]] == [name]


# --- That digests come back in order, and that the device is waited for once --------------------------------------


def test_bytes_that_change_later_are_digested_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "is_on_host", lambda flat: False)
    part = torch.arange(20, dtype=torch.uint8)
    pending = PendingDigests()
    pending.add(part)
    part += 1
    pending.add(part)
    one, other = pending.fetch()
    assert one != other


# --- Digests of states that do not consist of tensors alone -------------------------------------------------------


@dataclass
class Thing:
    name: str
    parts: list[Any]


def circle(value: int) -> list[Any]:
    """Return a list that contains itself."""
    found: list[Any] = [value]
    found.append(found)
    return found


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, 2),
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        (0.1 + 0.2, 0.3),
        ("a", b"a"),
        (None, 0),
        ([1, 2], [2, 1]),
        ([[1], 2], [1, [2]]),
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"b": 1}),
        (torch.zeros(2), torch.zeros(1, 2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2), torch.tensor([0.0, -0.0])),
        (np.zeros(2), np.zeros(3)),
        (np.float32(1.5), np.float32(1.25)),
        (timedelta(seconds=1), timedelta(seconds=2)),
        (deque([1]), deque([2])),
        (Thing("a", [torch.zeros(1)]), Thing("a", [torch.ones(1)])),
        (torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(3)),
        ("/runs/1/step=2.ckpt", "/runs/1/step=3.ckpt"),
        ("a/x", "b/x"),
        (circle(1), circle(2)),
        (print, len),
    ],
)
def test_another_value_has_another_digest(a: Any, b: Any) -> None:
    assert digest_value(a) != digest_value(b)
    assert digest_value([a]) == digest_value([a])


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (OrderedDict(b=1, a=2), {"a": 2, "b": 1}),
        ((1, 2), [1, 2]),
        ({3, 1, 2}, {2, 3, 1}),
        ("/runs/1/step=2.ckpt", "/runs/2/step=2.ckpt"),  # of an absolute path only the last name counts
        ({"/runs/1/x": 1}, {Path("/runs/2/x"): 1}),
        (circle(1), circle(1)),
        (threading.Lock(), threading.Lock()),
    ],
)
def test_what_recovery_may_change_does_not_count(a: Any, b: Any) -> None:
    assert digest_value(a) == digest_value(b)
