"""A save that is made while training goes on: a request that a framework's queue, or a thread, carries out."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from checkpointless.replication.agreement import LocalCheckpointError

logger = logging.getLogger(__name__)

_TURN_S = 0.05


class AsyncRequest(NamedTuple):
    """What is still to be done for a save.

    It has the fields and methods of the requests of Megatron-core
    (``megatron.core.dist_checkpointing.strategies.async_utils``) and of nvidia-resiliency-ext
    (``checkpointing.async_ckpt.core``), so that the ``AsyncCallsQueue`` of either one can schedule it, also with a
    persistent worker. Without such a queue, :class:`AsyncSave` carries it out in a thread.

    Attributes:
        async_fn: writes this rank's files; it may be called in another process. None: there is nothing to write.
        async_fn_args: its arguments.
        finalize_fns: called one after the other, on all ranks together, when the files of all ranks are written.
        async_fn_kwargs: its keyword arguments.
        preload_fn: always None: the state was copied to host memory when the save was asked for.
        is_frozen: whether no function may be added any more.
        call_idx: the number that a queue gives it.
    """

    async_fn: Callable[..., None] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], None]]
    async_fn_kwargs: Mapping[str, Any] = {}
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], None]) -> None:
        """Have ``fn`` called after the other functions that end the save.

        Raises:
            RuntimeError: the request is frozen.
        """
        if self.is_frozen:
            raise RuntimeError("the request is scheduled: nothing can be added to its end any more")
        self.finalize_fns.append(fn)

    def freeze(self) -> AsyncRequest:
        """Return the request as one to which nothing can be added."""
        return self._replace(is_frozen=True)

    def execute_sync(self) -> None:
        """Carry the request out now. Collective."""
        self.write()
        if dist.is_initialized():
            dist.barrier()
        self.execute_finalize_fns()

    def write(self) -> None:
        """Write this rank's files."""
        if self.async_fn is not None:
            self.async_fn(*self.async_fn_args, **self.async_fn_kwargs)

    def execute_finalize_fns(self, validate_matching_call_idx: bool = False) -> int:
        """End the save, whose files are written on all ranks. Collective.

        Args:
            validate_matching_call_idx: is accepted and not needed: the ranks compare the saves that they end.

        Returns:
            The number of the request.
        """
        for each in self.finalize_fns:
            each()
        return self.call_idx


class AsyncSave:
    """Carries a request out in a thread of this process.

    Args:
        request: what :meth:`~checkpointless.replication.local_checkpoint.LocalCheckpointManager.save` has returned.
    """

    def __init__(self, request: AsyncRequest) -> None:
        self._request = request.freeze()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="checkpointless-write")
        self._thread.start()

    def done(self) -> bool:
        """Return whether this rank's files are written, or cannot be."""
        return not self._thread.is_alive()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait until the files of all ranks are written, and end the save. Collective.

        Args:
            timeout: how long to wait for this rank's files at most; None: as long as it takes.

        Raises:
            TimeoutError: the files are not written yet.
            LocalCheckpointError: writing raised an error that costs more than a copy.
        """
        deadline_s = None if timeout is None else time.monotonic() + timeout.total_seconds()
        while self._thread.is_alive():  # in turns: a thread that waits for a lock hears no interruption
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise TimeoutError("a local checkpoint is still being written")
            self._thread.join(_TURN_S)
        self._request.execute_finalize_fns()
        if self._error is not None:
            raise LocalCheckpointError(f"a local checkpoint could not be written: {self._error}") from self._error

    def _run(self) -> None:
        try:
            self._request.write()
        except Exception as error:
            logger.exception("a local checkpoint could not be written")
            self._error = error
