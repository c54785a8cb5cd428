"""Provide process groups of the test device, which torch takes for a backend of its own."""

from __future__ import annotations

import functools
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from checkpointless.inprocess.communicators.process_groups import process_groups
from tests.device.communicator import Communicator
from tests.device.device import Device, Operation

BACKEND = "late"
_SUM, _AVG, _MAX, _MIN = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN
_COMBINES = ((_SUM, torch.add), (_AVG, torch.add), (_MAX, torch.maximum), (_MIN, torch.minimum))
_ProcessGroup: Any = dist.ProcessGroup  # Any: its methods are overloaded, and torch calls one of each


class LateWork(dist.Work):
    """Represents what was launched; waiting for it only orders what follows on the device, unless it ``blocks``."""

    def __init__(self, device: Device, operation: Operation, blocks: bool = False) -> None:
        super().__init__()
        self._device, self._operation, self._blocks = device, operation, blocks

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Order what follows; return True, also after an abort."""
        if self._blocks:
            self._device.synchronize(self._operation)
        return True

    def is_completed(self) -> bool:
        return self._operation.is_done

    is_success = is_completed

    def synchronize(self) -> None:
        """Order what follows."""


class LateNCCLGroup(_ProcessGroup):  # type: ignore[misc]
    def __init__(self, device: Device, store: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._device = device
        self._communicator = Communicator(device, store, rank, size)
        self._launched = 0  # collectives
        self._sent: Counter[tuple[int, int]] = Counter()

    # ---- what torch asks

    def getBackendName(self) -> str:
        return BACKEND

    def _get_backend(self, device: torch.device) -> LateNCCLGroup:
        if device.type != "cuda":
            raise RuntimeError("no backend for it")
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self._launched

    def _set_sequence_number_for_group(self) -> None:
        pass

    def abort(self) -> None:
        self._communicator.abort()

    def shutdown(self) -> None:
        self._communicator.abort()
        self._communicator.close()

    # ---- collectives

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> LateWork:
        if self._device.capture is not None:
            self._device.capture(self._communicator, lambda: self.allreduce(tensors, opts))
            return LateWork(self._device, Operation.done())
        return self._collective(tensors, tensors, _reducing(opts, tensors))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> LateWork:
        root = opts.rootRank == self._communicator.rank
        return self._collective(tensors, tensors if root else [], _reducing(opts, tensors) if root else _nothing)

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> LateWork:
        root = 0 if opts is None else opts.rootRank
        given = tensors if root == self._communicator.rank else []

        def take(given: list[list[torch.Tensor]]) -> None:
            _copy(tensors, given[root])

        return self._collective(given, tensors, take, [tensors if rank == root else [] for rank in self._ranks])

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> LateWork:
        return self.all_gather_single_coalesced([output], [given])

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], given: Sequence[torch.Tensor], opts: Any = None
    ) -> LateWork:
        def take(found: list[list[torch.Tensor]]) -> None:
            for index, output in enumerate(outputs):
                _copy([output], [torch.cat([each[index].reshape(-1) for each in found]).reshape(output.shape)])

        return self._collective(given, outputs, take)

    def allgather(
        self, outputs: Sequence[Sequence[torch.Tensor]], given: Sequence[torch.Tensor], opts: Any = None
    ) -> LateWork:
        def take(all_given: list[list[torch.Tensor]]) -> None:
            for each, found in zip(outputs[0], all_given, strict=True):
                _copy([each], found)

        return self._collective(given, outputs[0], take, [[each] for each in outputs[0]])

    def gather(self, outputs: Any, given: Sequence[torch.Tensor], opts: Any = None) -> LateWork:
        if opts.rootRank != self._communicator.rank:
            return self._collective(given, [], _nothing)
        return self.allgather(outputs, given)

    def scatter(self, outputs: Sequence[torch.Tensor], given: Any, opts: Any = None) -> LateWork:
        root, rank = opts.rootRank, self._communicator.rank
        mine = given[0] if root == rank else []
        shapes = [list(outputs) * len(self._ranks) if each == root else [] for each in self._ranks]
        return self._collective(mine, outputs, lambda found: _copy(outputs, [found[root][rank]]), shapes)

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> LateWork:
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], given: Sequence[torch.Tensor], opts: Any = None
    ) -> LateWork:
        rank = self._communicator.rank

        def take(found: list[list[torch.Tensor]]) -> None:
            for index, output in enumerate(outputs):
                parts = [each[index].reshape(len(self._ranks), -1)[rank] for each in found]
                _copy([output], [_reduced(opts, parts).reshape(output.shape)])

        return self._collective(given, outputs, take)

    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], given: Sequence[Sequence[torch.Tensor]], opts: Any = None
    ) -> LateWork:
        rank = self._communicator.rank

        def take(found: list[list[torch.Tensor]]) -> None:
            _copy(outputs, [_reduced(opts, [each[rank] for each in found])])

        return self._collective(given[0], outputs, take)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> LateWork:
        size = len(self._ranks)
        room = output.split(output_splits or output.shape[0] // size)
        return self.alltoall(room, given.split(input_splits or given.shape[0] // size))

    def alltoall(
        self, outputs: Sequence[torch.Tensor], given: Sequence[torch.Tensor], opts: Any = None
    ) -> LateWork:
        rank = self._communicator.rank

        def take(found: list[list[bytes]]) -> None:
            for each, parts in zip(outputs, found, strict=True):
                _copy([each], [_tensor(parts[rank], each)])

        return self._exchanging([_bytes(each) for each in given], outputs, take)

    def barrier(self, opts: Any = None) -> LateWork:
        work = self._collective([], [], _nothing)
        work._blocks = True
        return work

    # ---- messages

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int = 0) -> LateWork:
        data, number = pickle.dumps([*map(_bytes, tensors)]), self._number(self._communicator.rank, peer)
        _count(self, tensors, peer)
        return self._launch([], lambda: self._communicator.send(peer, number, data))

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int = 0) -> LateWork:
        number = self._number(peer, self._communicator.rank)
        _count_received(self, tensors, peer)

        def work() -> None:
            data = self._communicator.receive(peer, number)
            if data is not None:
                _copy(tensors, _tensors(pickle.loads(data), tensors))

        return self._launch(tensors, work)

    def _number(self, source: int, target: int) -> int:
        self._sent[source, target] += 1
        return self._sent[source, target]

    # ---- how

    @property
    def _ranks(self) -> range:
        return range(self._communicator.size)

    def _collective(
        self,
        given: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        take: Callable[[list[list[torch.Tensor]]], None],
        shapes: Sequence[Sequence[torch.Tensor]] | None = None,
    ) -> LateWork:
        """Launch an exchange of ``given``, of which ``take`` makes ``outputs``.

        ``shapes`` are like each rank's; None: as those of ``given``.
        """
        known = [given for _ in self._ranks] if shapes is None else shapes
        return self._exchanging(
            [_bytes(each) for each in given],
            outputs,
            lambda found: take([_tensors(each, like) for each, like in zip(found, known, strict=True)]),
        )

    def _exchanging(
        self, parts: list[bytes], outputs: Sequence[torch.Tensor], take: Callable[[list[list[bytes]]], None]
    ) -> LateWork:
        """Launch an exchange of byte strings, one for each rank or one for all."""
        self._launched += 1
        data = pickle.dumps(parts)

        def work() -> None:
            found = self._communicator.exchange(data)
            if found is not None:
                take([pickle.loads(each) for each in found])

        return self._launch(outputs, work)

    def _launch(self, outputs: Iterable[torch.Tensor], work: Callable[[], None]) -> LateWork:
        operation = Operation(outputs)
        self._communicator.launch(operation, work)
        return LateWork(self._device, operation)


#: The methods that torch's class has are counted; those of a class in Python take their place.
_count = process_groups.counting(True, lambda *_: None)
_count_received = process_groups.counting(False, lambda *_: None)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()


def _tensor(data: bytes, like: torch.Tensor) -> torch.Tensor:
    if not data:
        return like.detach().new_empty(0)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(like.dtype).reshape(like.shape)


def _tensors(parts: Sequence[bytes], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [_tensor(part, each) for part, each in zip(parts, like, strict=True)]


def _copy(outputs: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
    for output, each in zip(outputs, given, strict=True):
        output.detach().copy_(each)


def _nothing(found: object) -> None:
    pass


def _reducing(opts: Any, outputs: Sequence[torch.Tensor]) -> Callable[[list[list[torch.Tensor]]], None]:
    def take(found: list[list[torch.Tensor]]) -> None:
        for index, output in enumerate(outputs):
            _copy([output], [_reduced(opts, [each[index] for each in found])])

    return take


def _reduced(opts: Any, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Reduce in the order of the ranks, so that all ranks have the same bits."""
    op = opts.reduceOp if opts is not None else _SUM
    for known, combine in _COMBINES:
        if op == known:
            found = functools.reduce(combine, parts)
            return found / len(parts) if op == _AVG else found
    raise NotImplementedError(str(op))
