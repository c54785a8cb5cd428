"""The digest of :mod:`checkpointless.state.serialization.digest` as one kernel. Only this imports Triton.

Triton reads annotations when it compiles, so they name only what it knows.
"""

from __future__ import annotations

import triton
import triton.language as tl

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)  # as in digest.py, without a sign
_FIRST_FACTOR = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _mixed(lanes: tl.tensor, position: tl.tensor) -> tl.tensor:
    """Return the lanes, uint64, mixed with weights for their positions in the chunk, which begin at 1."""
    mixed = lanes + position.to(tl.uint64) * _GOLDEN
    mixed = (mixed ^ (mixed >> 30)) * _FIRST_FACTOR
    mixed = (mixed ^ (mixed >> 27)) * _SECOND_FACTOR
    return mixed ^ (mixed >> 31)


@triton.jit(do_not_specialize=["nbytes"])  # one kernel for buckets of all sizes
def add_digest(
    raw: tl.tensor,
    words: tl.tensor,
    total: tl.tensor,
    nbytes: tl.int64,
    block: tl.constexpr,
    chunk: tl.constexpr,
    aligned: tl.constexpr,
) -> None:
    """Add the digest of the bytes of one block to ``total``. Sums modulo 2**64 do not depend on the order.

    Args:
        words: the same bytes as int64, if they are ``aligned``; else not used.
        total: where the digest is summed up, int64.
        block: how many lanes of 8 bytes each program reads; a power of two.
        chunk: how many lanes a chunk has; a multiple of ``block``.
        aligned: whether the bytes begin at a multiple of 8.
    """
    first = tl.program_id(0).to(tl.int64) * block
    index = first + tl.arange(0, block)
    whole = nbytes // 8
    inside = index < whole
    if aligned:
        lanes = tl.load(words + index, mask=inside, other=0).to(tl.uint64, bitcast=True)
    else:
        lanes = tl.zeros([block], dtype=tl.uint64)
        for place in tl.static_range(8):
            byte = tl.load(raw + index * 8 + place, mask=inside, other=0)
            lanes = lanes | (byte.to(tl.uint64) << (8 * place))
    mixed = _mixed(lanes, index % chunk + 1)
    weight = (2 * (first // chunk) + 5).to(tl.uint64)
    digest = tl.sum(tl.where(inside, mixed, 0), axis=0) * weight
    if tl.program_id(0) == 0:
        end = tl.arange(0, 8)
        last = tl.load(raw + whole * 8 + end, mask=whole * 8 + end < nbytes, other=0)
        lane = tl.sum(last.to(tl.uint64) << (8 * end).to(tl.uint64), axis=0)
        tail = _mixed(lane, whole * 0 + 1) * 3  # as a chunk with the number -1
        has_tail = (nbytes % 8 != 0).to(tl.uint64)
        digest += tail * has_tail + nbytes.to(tl.uint64)
    tl.atomic_add(total, digest.to(tl.int64, bitcast=True), sem="relaxed")
