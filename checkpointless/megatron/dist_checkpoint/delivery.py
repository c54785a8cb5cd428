"""Bring chunks from the rank that has each to all ranks that need it, in digest-checked buckets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from checkpointless.megatron.dist_checkpoint.plan import Delivery, rounds_of
from checkpointless.replication.agreement import own_rank, world_size
from checkpointless.replication.retrieval import all_of
from checkpointless.serialization.state_tree import Tree
from checkpointless.transfer.tensor_entry import Key, TensorEntry
from checkpointless.transfer.transfer import Fill, receive_state, send_state


def deliver(
    deliveries: Sequence[Delivery], values: Mapping[int, Tree], room: Callable[[int], torch.Tensor | None]
) -> dict[int, Tree]:
    """Carry deliveries out, those of many pairs of ranks at the same time. All ranks are given the same.

    Args:
        deliveries: what has to be sent.
        values: what this rank has: tensors, and encoded objects.
        room: returns the tensor that a chunk's bytes go to; None: it goes to a new one, on the CPU.

    Returns:
        What arrived, by chunk.

    Raises:
        TransferError: something arrived damaged and could not be mended; all other deliveries were made.
    """
    arrived: dict[int, Tree] = {}

    def carry_out(delivery: Delivery) -> None:
        if delivery.source == own_rank():
            _send(delivery, values)
        else:
            arrived.update(_receive(delivery, room))

    rounds = rounds_of(deliveries, world_size())
    all_of(carry_out, [each for one in rounds for each in one if own_rank() in (each.source, each.destination)])
    return arrived


def _send(delivery: Delivery, values: Mapping[int, Tree]) -> None:
    tensors: dict[Key, torch.Tensor] = {}
    objects: dict[str, Tree] = {}
    for chunk in delivery.chunks:
        value = values[chunk]
        if isinstance(value, torch.Tensor):
            tensors[(chunk,)] = value.detach()
        else:
            objects[str(chunk)] = value
    send_state(tensors, objects, [Fill(delivery.destination, 0, 1)])


def _receive(delivery: Delivery, room: Callable[[int], torch.Tensor | None]) -> dict[int, Tree]:
    arrived: dict[int, Tree] = {}

    def allocate(entries: Sequence[TensorEntry]) -> Mapping[Key, torch.Tensor]:
        given: dict[Key, torch.Tensor] = {}
        for entry in entries:
            chunk = int(entry.key[0])
            place = room(chunk)
            given[entry.key] = torch.empty(entry.shape, dtype=entry.dtype) if place is None else place.detach()
            arrived[chunk] = given[entry.key]
        return given

    objects, _ = receive_state([delivery.source], allocate)
    arrived.update({int(chunk): value for chunk, value in objects.items()})
    return arrived
