"""Stop what a rank is doing, from the fault thread, while the main thread may be blocked in it.

A data-loader worker takes the lock of an event for each batch, to see whether it has to end; the process that
started it takes it to end the worker. A worker that is killed with the lock never releases it, and the other
process waits forever in C, where no interruption is handled (``benchmarks/soak/worker_locks.py`` counts how often).
Nor does a read of a message end that was only partly written: the reader holds the other end of the pipe.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import entry_points
from multiprocessing import connection, util
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from torch.utils.data._utils import signal_handling

from checkpointless.inprocess.communicators.process_groups import process_groups
from checkpointless.inprocess.exceptions import line_of
from checkpointless.inprocess.generation import HPState
from checkpointless.system import temp_folder

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

logger = logging.getLogger(__name__)

_END_S = 1.0  # a worker that is asked to end does so within milliseconds
_DEATH_S = 10.0  # one that is killed does so as soon as it is scheduled
_LOCK_S = 1.0  # a living process holds the lock for microseconds


def _end_workers(iterator: _MultiProcessingDataLoaderIter) -> None:
    """End the workers of one iterator within 12 s, and free threads that would wait for what the workers held."""
    workers = list(iterator._workers)
    _watch_no_more(iterator)
    for worker in workers:
        if _is_alive(worker):
            worker.terminate()
    if not _have_ended(workers, _END_S):
        for worker in workers:  # a newly forked one has its parent's handlers and may ignore SIGTERM
            if _is_alive(worker):
                worker.kill()
        if not _have_ended(workers, _DEATH_S):
            logger.warning("a data-loader worker could not be killed")
            return
    _free_lock(iterator)
    _end_messages(iterator)
    temp_folder.remove_shared(cast(int, worker.pid) for worker in workers)
    try:
        _remove_unused_sockets()
    except OSError as error:
        logger.warning("sockets of data-loader workers are not removed: %s", error)


def _watch_no_more(iterator: _MultiProcessingDataLoaderIter) -> None:
    """Keep torch's SIGCHLD handler, which raises wherever the main thread is, from reporting a failure."""
    if getattr(iterator, "_worker_pids_set", False):
        iterator._worker_pids_set = False
        with contextlib.suppress(ValueError):  # the main thread did so at the same time
            signal_handling._remove_worker_pids(id(iterator))


def _have_ended(workers: Sequence[BaseProcess], limit_s: float) -> bool:
    deadline_s = time.monotonic() + limit_s
    for worker in workers:
        worker.join(max(0.0, deadline_s - time.monotonic()))
    return not any(_is_alive(worker) for worker in workers)


def _is_alive(worker: BaseProcess) -> bool:
    """Return whether ``worker`` lives, also by its sentinel: ``is_alive`` stays true after an interrupted reap."""
    return worker.is_alive() and not connection.wait([worker.sentinel], 0)


def _free_lock(iterator: _MultiProcessingDataLoaderIter) -> None:
    condition = getattr(getattr(iterator, "_workers_done_event", None), "_cond", None)
    if condition is None:
        return
    if not condition.acquire(True, _LOCK_S):
        logger.warning("a data-loader worker died while it held a lock; the lock is released")
    with contextlib.suppress(ValueError):  # the main thread held it after all and has released it
        condition.release()


def _end_messages(iterator: _MultiProcessingDataLoaderIter) -> None:
    """Let the reader of a message that will never be complete reach the end of the stream."""
    if getattr(iterator, "_pin_memory_thread", None) is None:  # the pin-memory thread is told by a message to end
        writer = getattr(getattr(iterator, "_worker_result_queue", None), "_writer", None)
        if writer is not None:
            writer.close()


_BOUND = Path("/proc/net/unix")  # unix(7): the eighth field is the path that a socket is bound to


def share_socket_folder() -> None:
    """Make the processes that this one starts from now on create their sockets in this process's folder."""
    try:
        util.get_temp_dir()
    except OSError as error:  # data loaders with workers report it, too; others need no folder
        logger.warning("no temporary folder for sockets of data-loader workers: %s", error)


def _remove_unused_sockets() -> None:
    found = [str(path) for path in Path(util.get_temp_dir()).glob("listener-*")]
    if not found:
        return
    lines = _BOUND.read_text(errors="surrogateescape").splitlines()
    bound = {fields[7] for fields in (line.split(maxsplit=7) for line in lines) if len(fields) == 8}
    for path in found:
        if path not in bound:
            with contextlib.suppress(FileNotFoundError):
                Path(path).unlink()


class Compose:
    """Calls ``instances`` from the last to the first, as a composition of functions does, and HyperPod's and NVRx's
    do.

    Each is called with as many of the positional arguments as it takes, even if one before it raises: half a
    clean-up is worse than a noisy one. All errors are logged, and the first one is raised at the end.
    """

    def __init__(self, *instances: Callable[..., object]) -> None:
        self.instances: tuple[Callable[..., object], ...] = instances

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        first: Exception | None = None
        for instance in reversed(self.instances):
            try:
                instance(*taken(instance, args), **kwargs)
            except Exception as error:  # noqa: BLE001 - collected, and raised below
                logger.error("%s failed: %s", _name(instance), line_of(error))
                first = first or error
        if first is not None:
            raise first

    def register_attributes(self, trainer: object) -> None:
        """Pass the trainer to every instance that has a method of this name."""
        for instance in self.instances:
            register = getattr(instance, "register_attributes", None)
            if register is not None:
                register(trainer)

    def after_block(self, state: HPState) -> None:
        """Run the ``after_block`` of all aborts in it, in the main thread, after the block."""
        for instance in reversed(self.instances):
            if isinstance(instance, Abort | Compose):
                instance.after_block(state)

    def __repr__(self) -> str:
        return f"Compose({', '.join(_name(instance) for instance in self.instances)})"


def taken(function: Callable[..., object], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the first of ``args``: as many as ``function`` takes by position."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a function in C that does not say
        return args
    kinds = [each.kind for each in parameters]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return args
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return args[: sum(kind in by_position for kind in kinds)]


def _name(instance: Callable[..., object]) -> str:
    return getattr(instance, "__name__", type(instance).__name__)


_FP8 = ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8")  # 2.8 and later; earlier
_MODULES = "transformer_engine.pytorch.module.base"
_CACHES = (
    (_MODULES, "_multi_stream_cublas_workspace"),
    (_MODULES, "_dummy_wgrads"),
    ("transformer_engine.pytorch.attention.dot_product_attention.utils", "_cu_seqlens_cache"),
)
_FRAMEWORKS = "checkpointless.frameworks"  # group of entry points that register trainers' parts
_known: dict[str, _TrainerParts] = {}


class Abort(ABC):
    """An action that stops one kind of activity of a rank.

    It runs in the fault thread. It must return soon and be safe to repeat.
    """

    @abstractmethod
    def __call__(self, state: HPState) -> None:
        """Stop the activity."""

    def after_block(self, state: HPState) -> None:  # noqa: B027 - most have nothing to do then
        """Stop, in the main thread after the block, what must not be touched while the block still runs."""


class HPAbortTorchDistributed(Abort):
    """Aborts every communicator, NCCL's and gloo's: a rank that is blocked in a collective raises at once."""

    def __call__(self, state: HPState) -> None:
        process_groups.abort()


class _TrainerParts(Protocol):
    """Where a framework's trainer keeps what an abort has to stop."""

    def loader_iterators(self, trainer: object) -> Iterable[_MultiProcessingDataLoaderIter]:
        """Return torch's multiprocessing iterators that are in use."""

    def stop_saves(self, trainer: object) -> None:
        """Stop asynchronous checkpoint writers, unless the trainer keeps their saves and finishes them later."""


def register_trainer_parts(framework: str, parts: _TrainerParts) -> None:
    """Register how to find the parts of a framework's trainer; they find nothing in another's trainer."""
    _known[framework] = parts


def _load_frameworks() -> None:
    """Have the installed package register the frameworks that it knows, unless an import has done so."""
    for entry in entry_points(group=_FRAMEWORKS):
        entry.load()()
    if not _known:
        logger.warning("data-loader workers and checkpoint writers are not stopped: reinstall checkpointless")


class _TrainerAbort(Abort):
    """An abort that acts on the running trainer, once there is one."""

    def __init__(self) -> None:
        self._trainer: weakref.ref[object] | None = None

    def register_attributes(self, trainer: object) -> None:
        if not _known:
            _load_frameworks()
        self._trainer = weakref.ref(trainer)

    @property
    def trainer(self) -> object | None:
        return self._trainer() if self._trainer is not None else None


class HPDataLoaderAbort(_TrainerAbort):
    """Stops the data-loader workers, which frees a main thread that waits for a batch and leaves nothing."""

    def __call__(self, state: HPState) -> None:
        for parts in _known.values():
            for iterator in parts.loader_iterators(self.trainer):
                _end_workers(iterator)


class HPCheckpointingAbort(_TrainerAbort):
    """Stops asynchronous checkpoint writers, unless the strategy keeps their saves and finishes them later."""

    def __call__(self, state: HPState) -> None:
        for parts in _known.values():
            parts.stop_saves(self.trainer)


class AbortTransformerEngine(Abort):
    """Drops what TransformerEngine keeps for process groups that are gone, once the main thread has left the block.

    The exit of ``fp8_autocast`` relies on FP8 state, and kernels may wait in the communicators for overlapped
    tensor parallelism. This abort does nothing if TransformerEngine was not imported.
    """

    def __call__(self, state: HPState) -> None:
        """Do nothing, because nothing can be dropped while the block still runs."""

    def after_block(self, state: HPState) -> None:
        """Drop FP8 state, user buffers (``destroy_ub``), workspaces and cached tensors (idempotent).

        Without it ``initialize_ub`` fails, and makes the workspace that it finds three times as large.
        """
        for name in _FP8:
            manager = getattr(sys.modules.get(name), "FP8GlobalStateManager", None)
            if manager is not None:
                manager.reset()
                break
        modules: Any = sys.modules.get(_MODULES)
        if modules is not None:
            if getattr(modules, "_ub_communicators", None) or getattr(modules, "_ub_initialized", False):
                modules.destroy_ub()
            if hasattr(modules, "_cublas_workspace"):
                modules._cublas_workspace = None
        for module, cache in _CACHES:
            cached: dict[Any, Any] | list[Any] | None = getattr(sys.modules.get(module), cache, None)
            if cached is not None:
                cached.clear()


class CheckpointlessAbortManager:
    """Creates and changes compositions of aborts."""

    @staticmethod
    def get_default_checkpointless_abort() -> Compose:
        """Return the aborts for TransformerEngine, checkpoint writers, torch.distributed and data loaders, run from
        last to first.
        """
        return Compose(
            AbortTransformerEngine(), HPCheckpointingAbort(), HPAbortTorchDistributed(), HPDataLoaderAbort()
        )

    @staticmethod
    def create_custom_abort(*abort_instances: Abort) -> Compose:
        """Compose only the given aborts.

        Raises:
            ValueError: no abort was given.
        """
        if not abort_instances:
            raise ValueError("create_custom_abort() needs at least one abort instance")
        return Compose(*abort_instances)

    @staticmethod
    def override_abort(abort_compose: Compose, abort_type: type, new_abort: Abort) -> Compose:
        """Return a copy of ``abort_compose`` in which ``new_abort`` replaces the instances of ``abort_type``.

        Raises:
            ValueError: ``abort_compose`` is not a composition, or holds no ``abort_type``.
        """
        if not hasattr(abort_compose, "instances"):
            raise ValueError("abort_compose has no 'instances': pass a Compose")
        if not any(isinstance(each, abort_type) for each in abort_compose.instances):
            raise ValueError(f"{abort_compose!r} holds no {abort_type.__name__} to replace")
        return Compose(*(new_abort if isinstance(each, abort_type) else each for each in abort_compose.instances))
