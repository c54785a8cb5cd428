"""What the ranks of test_transfer.py do: some are filled, the others hold the state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from checkpointless.recovery.checksum import MemoryChecksumManager
from checkpointless.recovery.transfer import (
    Fill,
    Key,
    TensorEntry,
    TransferError,
    flip_a_bit,
    receive_state,
    send_state,
)

BUDGET = 64 * 1024  # buckets of 16 KiB


def state() -> dict[Key, torch.Tensor]:
    """Tensors of all dtypes and shapes, and keys of all kinds; the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    tensors: dict[Key, torch.Tensor] = {
        ("large",): torch.randn(100_003, generator=generator),
        ("strided",): torch.randn(64, 96, generator=generator).t(),
        ("empty",): torch.empty(0, 4),
        ("scalar",): torch.tensor(3, dtype=torch.int64),
        ("optimizer", 0, 1, "a.b"): torch.randn(7, 5, generator=generator).to(torch.float8_e4m3fn),
        ("optimizer", 0, "1", "a.b"): torch.randn(300, generator=generator).to(torch.bfloat16),
        ("flags",): torch.randn(33, generator=generator) > 0,
        ("complex",): torch.randn(21, generator=generator).to(torch.complex64),
    }
    for index in range(200):
        tensors["small", index] = torch.randn(index % 9 + 1, generator=generator)
    return tensors


def empty_like(entries: Sequence[TensorEntry]) -> dict[Key, torch.Tensor]:
    """Room for ``entries``, with gaps where the original has some."""
    room = {entry.key: torch.zeros(entry.shape, dtype=entry.dtype) for entry in entries}
    room["strided",] = torch.zeros(64, 96).t()
    return room


def fill(
    destinations: Sequence[int],
    damaged: Sequence[int] = (),
    damage_always: bool = False,
    known: str = "nothing",
) -> dict[str, Any]:
    """Fill ``destinations`` from all other ranks.

    Args:
        damaged: the holders that damage the bucket in the middle of what they send at first.
        damage_always: they damage all of them, again and again.
        known: what a destination has already: ``nothing``, ``large`` (right) or ``stale`` (all of it wrong).
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank, holders = dist.get_rank(), [each for each in range(dist.get_world_size()) if each not in destinations]
    original = state()
    objects = {"loops": {1: "one", "1": (2, None)}, "empty": {}}
    outcome: dict[str, Any] = {}
    if rank in destinations:
        have: Mapping[Key, torch.Tensor] = {}
        if known == "large":
            have = {("large",): original["large",].clone()}
        elif known == "stale":
            have = {key: tensor.clone().view_as(tensor) for key, tensor in original.items()}
            for tensor in have.values():
                if tensor.numel() and tensor.is_contiguous():
                    flip_a_bit(tensor)
        room: dict[Key, torch.Tensor] = {}

        def allocate(entries: Sequence[TensorEntry]) -> Mapping[Key, torch.Tensor]:
            room.update(empty_like(entries))
            return room

        try:
            arrived, report = receive_state(holders, allocate, known=have, memory_budget_bytes=BUDGET)
        except TransferError as error:
            outcome["error"] = str(error)
        else:
            checksums = MemoryChecksumManager()
            outcome = {
                "equal": checksums.digest_all(room) == checksums.digest_all(original),
                "keys": list(map(repr, room)) == list(map(repr, original)),
                "objects": arrived == objects,
                "report": vars(report),
            }
    else:
        seen: list[int] = []

        def on_bucket(position: int, count: int, payload: torch.Tensor) -> torch.Tensor:
            seen.append(position)
            first_round = len(seen) <= count
            if rank in damaged and (damage_always or (first_round and position == count // 2)):
                payload = payload.clone()
                flip_a_bit(payload)
            return payload

        fills = [Fill(destination, holders.index(rank), len(holders)) for destination in destinations]
        send_state(original, objects, fills, on_bucket=on_bucket)
        outcome["sent"] = len(seen)
    dist.barrier()
    return outcome


def total_bytes() -> int:
    """Bytes of the whole state."""
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in state().values())
