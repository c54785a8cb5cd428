"""Copies on another node of what is a rank's own, for when a node is lost with its boards.

Once a rank has drawn from its random streams, no peer has them by construction, and they cannot be rebuilt from
the model. This also holds for the streams that the order of its data was drawn from, and for buffers of its
modules. So before each optimizer update, every rank sends them to the rank ``jump`` places further on. That rank
keeps those of the two newest steps in its memory and on its board: 10 to 50 kB per rank and step, and the buffers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from checkpointless.inprocess.context import own_board
from checkpointless.launcher.protocol.board import Board
from checkpointless.state.serialization import state_tree
from checkpointless.system.environment import LOCAL_WORLD_SIZE_ENV
from checkpointless.transfer.exchange import (
    MAX_BYTES,
    all_gather_json,
    receive_bytes,
    send_bytes,
    to_bytes,
    to_tensor,
)
from checkpointless.transfer.wire import wire_device

_SERIES = Board.SERIES - 1  # the board's series for another rank's snapshots; a large one


@dataclass(frozen=True)
class RankLocalRecord:
    """What is a rank's own at a point, as bytes for another node to keep.

    Attributes:
        streams: the rank's random streams.
        data_start: the streams that the order of its data was drawn from; None if there are none.
        buffers: the record of its buffers; None if there is none.
    """

    streams: bytes
    data_start: bytes | None
    buffers: bytes | None

    def to_bytes(self) -> bytes:
        """Encode as plain data."""
        return state_tree.dumps((self.streams, self.data_start, self.buffers))

    @classmethod
    def from_bytes(cls, data: bytes) -> RankLocalRecord:
        """Decode what :meth:`to_bytes` made.

        Raises:
            ValueError: ``data`` was not made by :meth:`to_bytes`.
        """
        streams, data_start, buffers = state_tree.loads(data)
        return cls(streams, data_start, buffers)


class OwnReplicas:
    """Keeps what is another rank's own, and has this rank's kept.

    Args:
        jump: how many ranks further on a rank's streams are kept. None: on the next node, as ``LOCAL_WORLD_SIZE``
            says; but nowhere in a job on one node, whose boards are lost only with the whole job, or under another
            launcher than ours, which does not replace a node. 0: nowhere.

    Raises:
        ValueError: ``jump`` is negative.
    """

    def __init__(self, jump: int | None = None) -> None:
        if jump is not None and jump < 0:
            raise ValueError(f"rng_replication_jump must not be negative, but is {jump}")
        self._asked = jump
        self._jump: int | None = None
        self._kept: dict[int, bytes] = {}

    @property
    def jump(self) -> int:
        """How many ranks further on this job keeps a rank's streams; 0: nowhere."""
        if self._jump is None:  # computed once: it is needed at every step, and always the same in a job
            world = dist.get_world_size()
            jump = self._asked
            if jump is None:
                jump = int(os.environ.get(LOCAL_WORLD_SIZE_ENV, world)) if own_board() is not None else 0
            self._jump = jump % world
        return self._jump

    def exchange(self, step: int, streams: Callable[[], bytes]) -> None:
        """Send this rank's streams after ``step`` to the rank that keeps them, and keep another rank's. Collective.

        A rank that returns knows that its streams are kept only when the other ranks have returned, too: call this
        method before the vote on the step.

        Args:
            step: the optimizer step.
            streams: makes the streams' bytes; not called if they are kept nowhere.

        Raises:
            ValueError: the streams to be kept claim to be larger than 64 MiB.
        """
        jump = self.jump
        if jump == 0:
            return
        payload = streams()
        device = wire_device()
        size = torch.zeros(1, dtype=torch.int64, device=device)
        _pass_on(torch.tensor([len(payload)], dtype=torch.int64, device=device), size, jump)
        length = int(size.item())
        if not 0 <= length <= MAX_BYTES:
            raise ValueError(f"random streams of {length} bytes are over {MAX_BYTES}")
        theirs = torch.empty(length, dtype=torch.uint8, device=device)
        _pass_on(to_tensor(payload, device), theirs, jump)
        self._keep(step, to_bytes(theirs))

    def find(self, step: int, own: bool) -> tuple[bytes | None, list[int]]:
        """Give every rank that lacks its streams after ``step`` the copy that another rank keeps. Collective.

        Args:
            step: the optimizer step.
            own: whether this rank has its own streams.

        Returns:
            The streams that this rank was given, if it lacked its own; and the ranks whose streams are nowhere.
        """
        rank, world, jump = dist.get_rank(), dist.get_world_size(), self.jump
        kept = self._of(step)
        answers = all_gather_json({"own": own, "keeps": jump > 0 and kept is not None})
        lacking = [each for each in range(world) if not answers[each]["own"]]
        lost = [each for each in lacking if not answers[(each + jump) % world]["keeps"]]
        given: bytes | None = None
        if not lost:
            for each in lacking:  # in the same order on all ranks, so that a rank may both give and take
                keeper = (each + jump) % world
                if rank == keeper and kept is not None:
                    send_bytes(kept, each)
                elif rank == each:
                    given = receive_bytes(keeper)
        return given, lost

    def kept(self) -> dict[int, bytes]:
        """Return the streams of another rank that this rank keeps, by step."""
        board = own_board()
        if self._kept or board is None or self.jump == 0:
            return dict(self._kept)
        committed = board.read().committed
        found = {step: board.snapshot(step, series=_SERIES) for step in (committed, committed + 1) if step >= 0}
        return {step: payload for step, payload in found.items() if payload is not None}

    def _keep(self, step: int, payload: bytes) -> None:
        before = {step - 1: self._kept[step - 1]} if step - 1 in self._kept else {}
        self._kept = {**before, step: payload}  # one assignment: an interruption leaves the old or the new
        board = own_board()
        if board is not None:
            board.put_snapshot(step, payload, series=_SERIES)

    def _of(self, step: int) -> bytes | None:
        """Return the other rank's streams after ``step``, if this rank keeps them."""
        board = own_board()
        return self._kept.get(step) or (board.snapshot(step, series=_SERIES) if board is not None else None)


def _pass_on(mine: torch.Tensor, theirs: torch.Tensor, jump: int) -> None:
    """Send ``mine`` to the rank ``jump`` places further on, and receive ``theirs`` from the rank as far back."""
    rank, world = dist.get_rank(), dist.get_world_size()
    works: list[Any] = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, mine, (rank + jump) % world),
            dist.P2POp(dist.irecv, theirs, (rank - jump) % world),
        ]
    )
    for work in works:
        work.wait()
