"""Test that the digest on a device is the same in every way in which it is computed."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.state.serialization import digest as digests
from checkpointless.state.serialization.digest import (
    BLOCK_LANES,
    _digest_tensor,
    _FusedDigest,
    _torch_digest,
    _unsigned,
    launch,
)
from tests.drawn import examples
from tests.unit.serialization.played_triton import KERNEL, played_kernel

_WORD = 2**64
BLOCK, CHUNK = 4, 8
SIZES = [*range(18), *range(24, 42), 63, 64, 65, 71, 72, 73, 127, 128, 129, 200, 513]


@pytest.fixture(scope="module")
def numpy_kernel() -> Any:
    """Return the kernel, run by numpy."""
    return played_kernel()


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    """Return random bytes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


def by_definition(flat: torch.Tensor, chunk_lanes: int) -> int:
    """Return the digest as its definition has it, in whole numbers of Python."""

    def mixed(lane: int, position: int) -> int:
        lane = (lane + position * 0x9E3779B97F4A7C15) % _WORD
        lane = (lane ^ lane >> 30) * 0xBF58476D1CE4E5B9 % _WORD
        lane = (lane ^ lane >> 27) * 0x94D049BB133111EB % _WORD
        return lane ^ lane >> 31

    data = bytes(flat.tolist())
    total = len(data)
    for number in range(len(data) // 8):
        lane = int.from_bytes(data[8 * number : 8 * number + 8], "little")
        total += (2 * (number // chunk_lanes) + 5) * mixed(lane, number % chunk_lanes + 1)
    tail = data[len(data) // 8 * 8 :]
    if tail:
        total += 3 * mixed(int.from_bytes(tail, "little"), 1)
    return total % _WORD


def fused(kernel: Any, flat: torch.Tensor, chunk: int = CHUNK, block: int = BLOCK) -> int:
    """Return what the kernel computes."""
    return _unsigned(int(launch(kernel, flat, chunk, block).item()))


def in_torch(flat: torch.Tensor, chunk: int = CHUNK) -> int:
    """Return what torch's operations compute."""
    return _unsigned(int(_torch_digest(flat, chunk).item()))


@pytest.mark.parametrize("size", SIZES)
def test_the_kernel_in_numpy_and_torch_and_the_definition_agree(numpy_kernel: Any, size: int) -> None:
    flat = random_bytes(size, size)
    expected = by_definition(flat, CHUNK)
    assert in_torch(flat) == expected
    assert fused(numpy_kernel, flat) == expected


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 33, 100])
@pytest.mark.parametrize("offset", range(9))
def test_where_the_bytes_begin_does_not_matter(numpy_kernel: Any, size: int, offset: int) -> None:
    base = random_bytes(size + 9)
    flat = base[offset : offset + size]
    assert fused(numpy_kernel, flat) == in_torch(flat) == in_torch(flat.clone())


@given(st.binary(max_size=300), st.sampled_from([(1, 1), (1, 3), (2, 2), (2, 6), (4, 4), (8, 8), (16, 32)]))
@examples(200)
def test_blocks_do_not_matter_but_chunks_do_not_change_what_it_is(data: bytes, sizes: tuple[int, int]) -> None:
    block, chunk = sizes
    flat = torch.tensor(list(data), dtype=torch.uint8)
    assert fused(played_kernel(), flat, chunk, block) == by_definition(flat, chunk) == in_torch(flat, chunk)


def test_the_sizes_in_use_fit_each_other(numpy_kernel: Any) -> None:
    flat = random_bytes(8 * (2 * BLOCK_LANES + 5) + 3)
    chunk = digests.CHUNK_LANES
    assert fused(numpy_kernel, flat, chunk, BLOCK_LANES) == _unsigned(int(_digest_tensor(flat).item()))


@pytest.mark.parametrize(("block", "chunk"), [(3, 6), (4, 6), (8, 4)])
def test_a_block_must_lie_in_one_chunk(numpy_kernel: Any, block: int, chunk: int) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        launch(numpy_kernel, random_bytes(8), chunk, block)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_it_compiles_for_gpus(capability: int, aligned: bool) -> None:
    triton = pytest.importorskip("triton", reason="needs Triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    fixed = {"block": BLOCK_LANES, "chunk": digests.CHUNK_LANES, "aligned": aligned}
    signature = {"raw": "*u8", "words": "*i64", "total": "*i64", "nbytes": "i64"}
    source = ASTSource(
        importlib.import_module(KERNEL).add_digest,
        signature={**signature, **dict.fromkeys(fixed, "constexpr")},
        constexprs=fixed,
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    # "atom" is Triton's from 3.8 on, with a result that nothing reads.
    assert re.search(r"\b(red|atom)\.global\.gpu\.relaxed\.add\.u64", compiled.asm["ptx"])
    assert compiled.asm["cubin"]


class OnGpu:
    """Stands for bytes on a GPU, which are not looked at."""

    device = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("failure", "said"),
    [(ImportError("no module named triton"), []), (RuntimeError("no C compiler"), ["no C compiler"])],
)
def test_what_does_not_work_is_tried_once_and_said_once(
    failure: Exception, said: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = []

    def fail() -> Any:
        tries.append(failure)
        raise failure

    monkeypatch.setattr(digests, "_load_kernel", fail)
    flat: Any = OnGpu()
    digest = _FusedDigest()
    with caplog.at_level(logging.WARNING):
        assert [digest(flat, CHUNK) for _ in range(3)] == [None] * 3
    assert tries == [failure]
    assert len(caplog.messages) == len(said)
    assert all(each in message for each, message in zip(said, caplog.messages))


def test_bytes_on_the_host_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Callable[..., Any]] = []
    monkeypatch.setattr(digests, "_load_kernel", lambda: loaded.append(print))
    assert _FusedDigest()(random_bytes(8), CHUNK) is None
    assert not loaded
