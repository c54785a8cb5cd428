"""Stop what a rank is doing, from the fault thread, while the main thread may be blocked in it."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from checkpointless.inprocess import transformer_engine
from checkpointless.inprocess.communicators.gloo_sockets import GlooSockets
from checkpointless.inprocess.communicators.group_graveyard import bury
from checkpointless.inprocess.compose import Compose
from checkpointless.inprocess.data_workers.loader_workers import end_workers, worker_iterators
from checkpointless.inprocess.state import HPState

gloo_sockets = GlooSockets()


class Abort(ABC):
    """An action that stops one kind of activity of a rank.

    It runs in the fault thread. It must return soon and be safe to repeat.
    """

    @abstractmethod
    def __call__(self, state: HPState) -> None:
        """Stop the activity.

        Args:
            state: the rank's place in the job.
        """

    def after_block(self, state: HPState) -> None:  # noqa: B027 - most have nothing to do then
        """Stop, in the main thread after the block, what must not be touched while the block still runs.

        Args:
            state: the rank's place in the job.
        """


class TrainerAbort(Abort):
    """An abort that acts on the running Lightning trainer, once there is one."""

    def __init__(self) -> None:
        self._trainer: weakref.ref[Any] | None = None

    def register_attributes(self, trainer: Any) -> None:
        """Keep a weak reference to the running trainer."""
        self._trainer = weakref.ref(trainer)

    @property
    def trainer(self) -> Any:
        """The running trainer, or None."""
        return self._trainer() if self._trainer is not None else None


class HPAbortTorchDistributed(Abort):
    """Aborts every communicator: NCCL by ``abort()``, gloo by shutting down its connections.

    A rank that is blocked in a collective of either backend raises at once.
    """

    def __call__(self, state: HPState) -> None:
        for group in list(c10d._world.pg_map):
            for device in ("cuda", "cpu"):
                backend = _backend(group, device)
                if backend is not None and "nccl" in type(backend).__name__.lower():
                    backend.abort()
        gloo_sockets.shutdown()


def _backend(group: Any, device: str) -> Any:
    try:
        return group._get_backend(torch.device(device))
    except RuntimeError:  # the group has no backend for this kind of device
        return None


class HPDataLoaderAbort(TrainerAbort):
    """Stops the data-loader workers, which frees a main thread that waits for a batch and leaves nothing behind."""

    def __call__(self, state: HPState) -> None:
        trainer = self.trainer
        fit_loop = getattr(trainer, "fit_loop", None)
        loops = (fit_loop, getattr(getattr(fit_loop, "epoch_loop", None), "val_loop", None))
        for loop in loops:
            for iterator in worker_iterators(getattr(loop, "_combined_loader", None)):
                end_workers(iterator)


class HPCheckpointingAbort(TrainerAbort):
    """Stops asynchronous checkpoint writers, unless the strategy keeps their saves and finishes them later.

    A save that is not finished is not a checkpoint.
    """

    def __call__(self, state: HPState) -> None:
        strategy = getattr(self.trainer, "strategy", None)
        keep_saves = getattr(strategy, "keep_saves", None)
        if keep_saves is not None:
            keep_saves()
            return
        checkpoint_io = getattr(strategy, "_checkpoint_io", None)
        queue = getattr(checkpoint_io, "async_calls_queue", None)
        for call in getattr(queue, "async_calls", ()):
            process = getattr(getattr(call, "async_caller", None), "process", None)
            if process is not None and process.is_alive():
                process.kill()


class AbortTransformerEngine(Abort):
    """Drops what TransformerEngine keeps for process groups that are gone, once the main thread has left the block.

    TransformerEngine's FP8 state must not be reset while the block is inside ``fp8_autocast``, whose exit relies on
    it, and its communicators for overlapped tensor parallelism must not be dropped while kernels wait in them. This
    abort does nothing if TransformerEngine was not imported.
    """

    def __call__(self, state: HPState) -> None:
        """Do nothing, because nothing can be dropped while the block still runs."""

    def after_block(self, state: HPState) -> None:
        """Drop FP8 state, user buffers (``destroy_ub``) and workspaces."""
        transformer_engine.drop()


class CheckpointlessAbortManager:
    """Creates and changes compositions of aborts."""

    @staticmethod
    def get_default_checkpointless_abort() -> Compose:
        """Return the aborts for TransformerEngine, checkpoint writers, torch.distributed and data loaders.

        They run from last to first.
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


def communicators_first(abort: Any) -> Any:
    """Reorder a composition so that it aborts communicators first (``early_abort_communicator``)."""
    if not isinstance(abort, Compose):
        return abort
    first = [each for each in abort.instances if isinstance(each, HPAbortTorchDistributed)]
    rest = [each for each in abort.instances if not isinstance(each, HPAbortTorchDistributed)]
    return Compose(*rest, *first)


def after_block(abort: Any, state: HPState) -> None:
    """Run the ``after_block`` of an abort or of a composition's aborts, in the main thread, after the block."""
    for each in reversed(abort.instances) if isinstance(abort, Compose) else (abort,):
        if isinstance(each, Abort):
            each.after_block(state)


def destroy_process_groups() -> None:
    """Destroy every process group of this process, in the main thread, after the abort.

    This includes what an interrupted ``init_process_group`` leaves behind: torch counts the groups that it has
    named, and a rank that has counted one more than the others would wait for them forever under another name.
    """
    world = c10d._world
    bury(list(world.pg_map))
    if dist.is_initialized():
        dist.destroy_process_group()
    registries: list[Any] = [world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config]
    registries += [world.pg_to_tag, world.tags_to_pg, world.pg_coalesce_state]
    for registry in registries:
        registry.clear()
    world.group_count = 0
