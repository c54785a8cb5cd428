"""Who reads what, and who sends what to whom; and the sending, in digest-checked buckets.

Chunks are numbers here, from 0; ranks are global ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from checkpointless.replication.agreement import own_rank, world_size
from checkpointless.replication.retrieval import all_of
from checkpointless.serialization.state_tree import Tree
from checkpointless.transfer.tensor_entry import Key, TensorEntry
from checkpointless.transfer.transfer import Fill, receive_state, send_state

# --- pure functions of plain values, equal on all ranks -----------------------------------------------------------


@dataclass(frozen=True, order=True)
class Delivery:
    """What one rank sends to another one.

    Attributes:
        source: the rank that has the chunks.
        destination: the rank that needs them.
        chunks: the chunks, ascending.
    """

    source: int
    destination: int
    chunks: tuple[int, ...]


def needers_of(needs: Sequence[Collection[int]]) -> dict[int, tuple[int, ...]]:
    """Return, by chunk, the ranks that need it, ascending.

    Args:
        needs: by rank, the chunks that it needs.
    """
    needers: dict[int, list[int]] = defaultdict(list)
    for rank, chunks in enumerate(needs):
        for chunk in chunks:
            needers[chunk].append(rank)
    return {chunk: tuple(ranks) for chunk, ranks in sorted(needers.items())}


def readers_of(sizes: Mapping[int, int], candidates: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """Return, by chunk, the one rank that reads it, so that all ranks read about equally much.

    The largest chunks are assigned first, each to the candidate with the fewest bytes so far. So no rank reads
    more than its even share and one chunk, if every rank is a candidate for every chunk.

    Args:
        sizes: bytes of each chunk.
        candidates: for each chunk, the ranks that could read it, at least one.
    """
    load: dict[int, int] = defaultdict(int)
    readers = {}
    for chunk in sorted(sizes, key=lambda each: (-sizes[each], each)):
        reader = min(candidates[chunk], key=lambda rank: (load[rank], rank))
        readers[chunk] = reader
        load[reader] += max(1, sizes[chunk])
    return readers


def deliveries_of(sources: Mapping[int, int], needers: Mapping[int, Collection[int]]) -> tuple[Delivery, ...]:
    """Return what has to be sent, so that every rank has each chunk that it needs.

    Args:
        sources: by chunk, the rank that has it.
        needers: by chunk, the ranks that need it.
    """
    chunks: dict[tuple[int, int], list[int]] = defaultdict(list)
    for chunk, source in sources.items():
        for rank in needers.get(chunk, ()):
            if rank != source:
                chunks[source, rank].append(chunk)
    return tuple(Delivery(*ends, tuple(sorted(each))) for ends, each in sorted(chunks.items()))


def rounds_of(deliveries: Sequence[Delivery], world_size: int) -> tuple[tuple[Delivery, ...], ...]:
    """Sort deliveries into rounds in which no rank takes part twice, so that many pairs work at the same time.

    Every rank goes through its rounds in their order. So a rank that waits, waits for one that is not further, and
    no ranks wait for each other in a circle. Pairs that are equally far apart come one after the other, which keeps
    the rounds few when all ranks send to all others.

    Args:
        deliveries: what has to be sent.
        world_size: the number of ranks.
    """
    busy = [0] * world_size  # by rank, a bit for each round that it takes part in
    rounds: list[list[Delivery]] = []

    def distance(each: Delivery) -> tuple[int, int]:
        return (each.destination - each.source) % world_size, each.source

    for each in sorted(deliveries, key=distance):
        taken = busy[each.source] | busy[each.destination]
        number = (~taken & (taken + 1)).bit_length() - 1  # the first round in which both ends are free
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(each)
        busy[each.source] |= 1 << number
        busy[each.destination] |= 1 << number
    return tuple(tuple(each) for each in rounds)


# --- sending ------------------------------------------------------------------------------------------------------


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
