"""Bring chunks from the rank that has each to all ranks that need it, in digest-checked buckets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from checkpointless.inprocess.context import aside
from checkpointless.megatron.dist_checkpoint.plan import Delivery
from checkpointless.serialization.state_tree import Tree
from checkpointless.transfer.bucket_rounds import TransferError
from checkpointless.transfer.tensor_entry import Key, TensorEntry
from checkpointless.transfer.transfer import Fill, receive_state, send_state

logger = logging.getLogger(__name__)


def deliver(
    rounds: Sequence[Sequence[Delivery]],
    values: Mapping[int, Tree],
    room: Callable[[int], torch.Tensor | None],
) -> dict[int, Tree]:
    """Carry deliveries out, and return what arrived, by chunk. Every rank with a delivery calls it.

    Args:
        rounds: the deliveries, the same on all ranks, as
            :func:`~checkpointless.megatron.dist_checkpoint.plan.rounds_of` sorts them.
        values: what this rank has: tensors, and encoded objects.
        room: returns the tensor that a chunk's bytes go to; None: it goes to a new one, on the CPU.

    Raises:
        TransferError: something arrived damaged and could not be mended; all other deliveries were made.
    """
    arrived: dict[int, Tree] = {}
    own = [each for one in rounds for each in one if dist.get_rank() in (each.source, each.destination)]

    def carry_out() -> None:
        damage: TransferError | None = None
        for each in own:
            try:
                if each.source == dist.get_rank():
                    _send(each, values)
                else:
                    arrived.update(_receive(each, room))
            except TransferError as error:  # the others wait for this rank's next deliveries
                logger.warning("what rank %d sends to rank %d is damaged: %s", each.source, each.destination, error)
                damage = damage or error
        if damage is not None:
            raise damage

    aside(carry_out)
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
