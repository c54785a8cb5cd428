"""Bring chunks from the rank that has each to all ranks that need it, in digest-checked buckets."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from checkpointless.inprocess.context import aside
from checkpointless.megatron.dist_checkpoint.plan import Delivery
from checkpointless.serialization.state_tree import Tree
from checkpointless.transfer.bucket_rounds import TransferError
from checkpointless.transfer.tensor_entry import Key, TensorEntry
from checkpointless.transfer.transfer import Fill, receive_state, send_state
from checkpointless.transfer.wire import runs_ahead

logger = logging.getLogger(__name__)

_TURN_S = 0.05


class Deliveries:
    """Deliveries to and from this rank, which are carried out in turn while more is read from storage.

    On the CPU they are carried out in a thread. On a wire that runs ahead only one thread may launch messages, so
    each call of :meth:`add` waits.

    Args:
        values: what this rank has: tensors, and encoded objects. Chunks are put there before they are sent.
        room: returns the tensor that a chunk's bytes go to; None: it goes to a new one, on the CPU.
    """

    def __init__(self, values: Mapping[int, Tree], room: Callable[[int], torch.Tensor | None]) -> None:
        self._values = values
        self._room = room
        self._arrived: dict[int, Tree] = {}
        self._problem: Exception | None = None
        self._due: queue.SimpleQueue[Sequence[Delivery] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if not runs_ahead():
            # A fault that interrupts the load leaves the thread; it ends when its connections do.
            self._thread = threading.Thread(target=self._run, name="checkpointless-deliver", daemon=True)
            self._thread.start()

    def add(self, rounds: Sequence[Sequence[Delivery]]) -> None:
        """Have deliveries carried out. All ranks add the same, as ``rounds_of`` sorts them."""
        own = [each for one in rounds for each in one if dist.get_rank() in (each.source, each.destination)]
        if self._thread is None:
            aside(lambda: self._carry_out(own))
        else:
            self._due.put(own)

    def end(self) -> dict[int, Tree]:
        """Wait for all deliveries, and return what arrived, by chunk.

        Raises:
            TransferError: something arrived damaged and could not be mended; all other deliveries were made.
        """
        self._due.put(None)
        while self._thread is not None and self._thread.is_alive():  # in turns, which can be interrupted
            self._thread.join(_TURN_S)
        if self._problem is not None:
            raise self._problem
        return self._arrived

    def _run(self) -> None:
        while (own := self._due.get()) is not None:
            self._carry_out(own)
            if self._problem is not None and not isinstance(self._problem, TransferError):
                return  # a connection is broken

    def _carry_out(self, deliveries: Sequence[Delivery]) -> None:
        for each in deliveries:
            try:
                if each.source == dist.get_rank():
                    _send(each, self._values)
                else:
                    self._arrived.update(_receive(each, self._room))
            except TransferError as error:  # the others wait for this rank's next deliveries
                logger.warning("rank %d's chunks for rank %d are damaged: %s", each.source, each.destination, error)
                self._problem = self._problem or error
            except Exception as error:  # noqa: BLE001 - raised by end(), in the thread that waits
                self._problem = error
                return


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
