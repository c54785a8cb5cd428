"""The members of a clique give each other their parts, over a process group that nothing else uses.

All members exchange at the same time: in turn d each member sends its part to the member d places further on, and
receives one from the member as many places back.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from checkpointless.replication.host_memory import HostMemoryPool
from checkpointless.replication.parts import Part, PartError
from checkpointless.system.environment import LOCAL_WORLD_SIZE_ENV
from checkpointless.transfer.exchange import all_gather_json, to_bytes, to_tensor, wire_device

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 64 * 1024 * 1024
_HEADER_BYTES = 2 * 1024 * 1024 * 1024  # the most that a header may claim to take
_HOST = torch.device("cpu")


class CliqueExchange:
    """Exchanges parts among the members of one clique. All members call :meth:`exchange` together."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group: Any = group
        self._device = wire_device(group)
        self.members = tuple(dist.get_process_group_ranks(group))
        self._place = self.members.index(dist.get_rank())

    def exchange(self, part: Part | None, pool: HostMemoryPool) -> Iterator[tuple[int, Part]]:
        """Give ``part`` to all others; yield each of theirs with its rank, those that come undamaged."""
        nothing = torch.empty(0, dtype=torch.uint8)
        laid_out = part
        if part is not None and part.content.memory is None:
            laid_out = replace(part, content=pool.copy(part.content))
        header = nothing if laid_out is None else to_tensor(laid_out.header(), _HOST)
        for distance in range(1, len(self.members)):
            receiver = self.members[(self._place + distance) % len(self.members)]
            sender = self.members[(self._place - distance) % len(self.members)]
            arrived = self._turn(header, nothing if laid_out is None else _flat(laid_out), receiver, sender, pool)
            if arrived is not None:
                yield sender, arrived

    def _turn(
        self, header: torch.Tensor, memory: torch.Tensor, receiver: int, sender: int, pool: HostMemoryPool
    ) -> Part | None:
        """Send this rank's part to one member, if there is room for it, and receive that of another one."""
        told = torch.zeros(2, dtype=torch.int64)
        self._pass([torch.tensor([header.numel(), _digest(header)])], [told], receiver, sender)
        nbytes, digest = map(int, told)
        if not 0 <= nbytes <= _HEADER_BYTES:
            raise ValueError(f"rank {sender} announced a header of {nbytes} bytes")
        theirs = torch.empty(nbytes, dtype=torch.uint8)
        self._pass(_chunks(header), _chunks(theirs), receiver, sender)
        room = _room(theirs, digest, sender, pool) if nbytes else None
        answer = torch.zeros(1, dtype=torch.uint8)  # whether the receiver has room
        self._pass([torch.tensor([room is not None], dtype=torch.uint8)], [answer], sender, receiver)
        mine, its = _chunks(memory) if answer.item() else [], _chunks(_flat(room)) if room is not None else []
        self._pass(mine, its, receiver, sender)
        return room if room is not None and _is_whole(room, sender) else None

    def _pass(
        self, mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], receiver: int, sender: int
    ) -> None:
        if self._device == _HOST:
            works: list[Any] = [dist.irecv(each, sender, group=self._group) for each in theirs]
            works += [dist.isend(each, receiver, group=self._group) for each in mine]
            for work in works:
                work.wait()
            return
        for number in range(max(len(mine), len(theirs))):  # through the GPU, a chunk at a time
            room = [torch.empty_like(each, device=self._device) for each in theirs[number : number + 1]]
            sent = [each.to(self._device) for each in mine[number : number + 1]]
            operations = [dist.P2POp(dist.irecv, each, sender, self._group) for each in room]
            operations += [dist.P2POp(dist.isend, each, receiver, self._group) for each in sent]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            for place, each in zip(theirs[number : number + 1], room):
                place.copy_(each)


def _room(header: torch.Tensor, digest: int, sender: int, pool: HostMemoryPool) -> Part | None:
    """Return room for what a member sends; None, with a warning, if this rank has none."""
    try:
        if _digest(header) != digest:
            raise PartError("its header arrived damaged")
        return Part.described(to_bytes(header), pool.content)
    except (MemoryError, RuntimeError, ValueError) as error:  # torch raises the second if it cannot allocate
        logger.warning("no room for the copy of rank %d's state: %s", sender, error)
        return None


def _flat(part: Part) -> torch.Tensor:
    assert part.content.memory is not None
    return part.content.memory.flat


def _is_whole(part: Part, sender: int) -> bool:
    try:
        part.verify()
    except PartError as error:
        logger.warning("the copy of rank %d's state arrived damaged: %s", sender, error)
        return False
    return True


def _digest(flat: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(flat.numpy().data) - (1 << 63)  # as a number with a sign, for a tensor


def _chunks(flat: torch.Tensor) -> list[torch.Tensor]:
    return [flat[start : start + _CHUNK_BYTES] for start in range(0, flat.numel(), _CHUNK_BYTES)]


# --- which ranks keep whose parts ---------------------------------------------------------------------------------


def cliques_of(world_size: int, jump: int, factor: int) -> list[tuple[int, ...]]:
    """Return the ranks that keep each other's parts, ascending, by their first; ``ValueError`` if not possible.

    With J the jump and F the factor, cliques are ``n, n + J, ..., n + (F - 1) J`` for ``n = a J F + b``, with a
    from 0 to W / (J F) - 1 and b from 0 to J - 1 (as in nvidia-resiliency-ext's documentation): if J is the size of
    a node, no two members are on one.
    """
    if jump < 1 or factor < 1:
        raise ValueError(f"replication_jump and replication_factor must be positive, not {jump} and {factor}")
    block = jump * factor
    if world_size % block:
        raise ValueError(
            f"{world_size} ranks cannot be divided into cliques of {factor} ranks that are {jump} apart: the world "
            f"size must be a multiple of replication_jump * replication_factor = {block}. On a single node "
            "give replication_jump=1, which protects against the loss of files but not of the node"
        )
    firsts = (start + offset for start in range(0, world_size, block) for offset in range(jump))
    return [tuple(range(first, first + block, jump)) for first in firsts]


# --- the groups of cliques ----------------------------------------------------------------------------------------


def clique_group(jump: int, factor: int) -> dist.ProcessGroup:
    """Make gloo's groups of all cliques (parts are in host memory), and return this rank's. Collective.

    All ranks make all groups: torch names one after those made before, which differ where Megatron has groups of
    pipeline stages. They get the timeout of the job's group, which none inherits. A ``jump`` of 0: a node's ranks.
    ``ValueError`` if ranks ask for different cliques, or the world or node does not allow them.
    """
    jump = jump or int(os.environ.get(LOCAL_WORLD_SIZE_ENV, "0"))
    asked = {(each[0], each[1]) for each in all_gather_json([jump, factor])}
    if len(asked) > 1:
        raise ValueError(
            f"the ranks ask for different cliques, as (jump, factor): {sorted(asked)}. "
            "Where nodes have different numbers of ranks, give replication_jump"
        )
    if not jump:
        raise ValueError(f"{LOCAL_WORLD_SIZE_ENV} is not set: give replication_jump, the ranks of a node")
    mine, timeout = None, _timeout_of_the_job()
    for members in cliques_of(dist.get_world_size(), jump, factor):
        group = dist.new_group(list(members), backend="gloo", timeout=timeout)
        mine = group if dist.get_rank() in members else mine
    assert mine is not None, "every rank is in a clique"
    return mine


def _timeout_of_the_job() -> timedelta | None:
    world = dist.distributed_c10d._get_default_group()
    try:
        return world._get_backend(wire_device()).options._timeout
    except (AttributeError, RuntimeError):  # of TORCH_DISTRIBUTED_DEBUG=DETAIL's wrapper, which has no options
        return None
