"""A save strategy that keeps copies of what each rank writes, and lets the writing to storage fail."""

from __future__ import annotations

import copy
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from checkpointless.integrations.megatron.dist_checkpoint.copies import Copies, process_copies
from checkpointless.integrations.megatron.dist_checkpoint.load_strategy import (
    CopiesLoadStrategy,
    attempt_megatrons,
    told_by,
)
from checkpointless.integrations.megatron.dist_checkpoint.part import (
    Identity,
    Leaf,
    State,
    content_of,
    is_local,
    leaves_of,
    name_of,
    replaced,
    values_to_keep,
    write_identity,
)
from checkpointless.replication.agreement import attempt, gather, own_rank, world_size
from checkpointless.replication.parts import Content, SaveId
from checkpointless.system.patches import Patch, Patches

logger = logging.getLogger(__name__)


class DrainError(CheckpointingException):
    """A checkpoint did not get to storage; the message says on which rank, and why."""


class CopiesSaveStrategy(TorchDistSaveShardedStrategy):
    """Saves in Megatron's ``torch_dist`` format, and keeps copies of what this rank writes.

    What this rank writes is copied to host memory first; then training may go on. A thread exchanges the copies
    with the peers and writes them to lasting places, while Megatron writes the checkpoint itself. All ranks save
    together.

    A write to storage that fails costs a warning, and that checkpoint: it is not finished, so that Megatron's and
    NeMo's functions that finish it are not called, and its copies are dropped. The copies of the newest checkpoint
    that is whole are kept.

    Args:
        backend: the name of the format, as Megatron-core knows it.
        version: the version of the format.
        copies: where copies are kept; None: in the memory of this process.
        **kwargs: the other arguments of Megatron-core's ``TorchDistSaveShardedStrategy``.
    """

    def __init__(
        self, backend: str = "torch_dist", version: int = 1, *, copies: Copies | None = None, **kwargs: Any
    ) -> None:
        super().__init__(backend, version, **kwargs)
        self.copies = process_copies() if copies is None else copies
        self._metadata: _Guarded | None = None  # writes the metadata of the newest save

    def async_save(self, sharded_state_dict: State, checkpoint_dir: str | os.PathLike[str]) -> AsyncRequest:
        """Copy the state, keep the copies, and return what is left to do. Collective.

        Args:
            sharded_state_dict: nested dicts and lists of Megatron-core's ``ShardedTensor`` and ``ShardedObject``.
            checkpoint_dir: the directory to save to.

        Returns:
            A request that writes to storage, for an ``AsyncCallsQueue`` of Megatron-core. When it is scheduled, the
            model may be changed.
        """
        return self._request(sharded_state_dict, checkpoint_dir, forgiving=True)

    def save(self, sharded_state_dict: State, checkpoint_dir: str | os.PathLike[str]) -> None:
        """Save now. Collective.

        Raises:
            DrainError: on every rank, if the checkpoint did not get to storage.
        """
        self._request(sharded_state_dict, checkpoint_dir, forgiving=False).execute_sync()

    def _request(
        self, sharded_state_dict: State, checkpoint_dir: str | os.PathLike[str], forgiving: bool
    ) -> AsyncRequest:
        identity, exchanges = self._agree(checkpoint_dir)
        leaves = leaves_of(sharded_state_dict)
        if self.keep_only_main_replica:
            leaves = [leaf for leaf in leaves if is_main_replica(leaf.replica_id)]
        values = values_to_keep(leaves)
        copied = self.copies.keep(identity.save, content_of(identity, values), exchanges)
        if copied is not None:
            sharded_state_dict = _with_copies(sharded_state_dict, [leaf for leaf, _ in values], copied)
        request = super().async_save(sharded_state_dict, checkpoint_dir)
        return self._with_end(request, identity, checkpoint_dir, forgiving)

    def _agree(self, checkpoint_dir: str | os.PathLike[str]) -> tuple[Identity, bool]:
        """Return the identity of a new save and whether ranks exchange copies, the same on all. Collective."""
        told = gather([f"{time.time_ns():016x}{secrets.token_hex(4)}", self.copies.can_exchange])
        unable = [rank for rank, (_, can_exchange) in enumerate(told) if not can_exchange]
        if unable and own_rank() == unable[0]:
            logger.warning("%s is kept without copies at other ranks: an exchange is not over", checkpoint_dir)
        name = name_of(checkpoint_dir)
        number = re.search(r"(?:step=|iter_)(\d+)", name)  # as NeMo and Megatron-LM name checkpoints
        save = SaveId(int(number[1]) if number else 0, str(told[0][0]))
        return Identity(str(save), name, world_size()), not unable

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> AsyncRequest:
        """Keep the writer whose end is about to be prepared, so that an error on one rank holds up no other one."""
        self._metadata = writer.finish = _Guarded(writer.finish)
        return super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret)

    def _with_end(
        self, request: AsyncRequest, identity: Identity, checkpoint_dir: str | os.PathLike[str], forgiving: bool
    ) -> AsyncRequest:
        """Return Megatron's request with an end that may fail."""
        theirs, metadata, fns = tuple(request.finalize_fns), self._metadata, list[Callable[[], None]]()

        def finish() -> None:
            _, problem = attempt_megatrons(lambda: [each() for each in theirs])
            problem = problem or (metadata.problem if metadata is not None else None)
            words = told_by(f"{checkpoint_dir} did not get to storage", problem)
            if words:
                self.copies.end(identity.save, is_whole=False)
                if not forgiving:
                    raise DrainError(words) from problem
                del fns[1:]  # what finishes the checkpoint
                logger.warning("%s; training goes on, and the checkpoint before it is still there", words)
                return
            fns.append(partial(self._finish, identity, checkpoint_dir))  # behind what NeMo does to finish it

        fns.append(finish)
        return request._replace(finalize_fns=fns)

    def _finish(self, identity: Identity, checkpoint_dir: str | os.PathLike[str]) -> None:
        """End a save that is on storage."""
        if own_rank() == 0 and is_local(checkpoint_dir):
            _, problem = attempt(lambda: write_identity(identity, checkpoint_dir))
            if problem is not None:
                logger.warning("copies of %s will not be used: %s", checkpoint_dir, problem)
        self.copies.end(identity.save, is_whole=True)


def in_storage_of_its_own(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor in host memory as one whose storage is no larger; the memory is the same.

    Megatron copies tensors that are views of more than themselves once more.
    """
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    flat = tensor.view(-1).view(torch.uint8).numpy()
    return torch.frombuffer(flat.data, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)


def _with_copies(state: State, leaves: Sequence[Leaf], content: Content) -> State:
    """Return a sharded state with copies of tensors in the place of the tensors.

    Args:
        state: the state.
        leaves: those whose copies there are.
        content: their part.
    """
    data = {
        id(leaf): in_storage_of_its_own(value)
        for leaf, value in zip(leaves, content.state()["values"], strict=True)
        if isinstance(leaf, ShardedTensor)
    }

    def with_copy(leaf: Leaf) -> Leaf:
        mine = copy.copy(leaf)
        mine.data = data.get(id(leaf), leaf.data)
        return mine

    return replaced(state, with_copy)


class _Guarded:
    """Calls a function on one rank for which others wait, and keeps what it raises.

    Args:
        function: the function.

    Attributes:
        problem: what it raised.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self.problem: Exception | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Call the function, and keep what it raises."""
        _, self.problem = attempt(lambda: self._function(*args, **kwargs))


# --- Make the strategies the ones that Megatron-core uses for ``torch_dist`` if it is given none ------------------


_BACKEND = ("torch_dist", 1)
_PATCHES = Patches()


def register(copies: Copies | None = None) -> None:
    """Make ``dist_checkpointing.save`` and ``load`` use our strategies when they are given none.

    A later call takes the place of an earlier one.

    Args:
        copies: the copies to keep and to load from; None: those of this process.

    Raises:
        ImportError: this Megatron-core has no default strategies.
    """
    unregister()
    _install(_PATCHES, CopiesLoadStrategy(copies=copies), CopiesSaveStrategy(copies=copies))


def unregister() -> None:
    """Make Megatron-core use its own strategies again."""
    _PATCHES.undo()


def are_defaults() -> bool:
    """Return whether our strategies are the ones that Megatron-core uses if it is given none."""
    return _PATCHES.are_made


@contextmanager
def loading(strategy: CopiesLoadStrategy) -> Iterator[None]:
    """Return a context in which Megatron-core loads with ``strategy`` if it is given none."""
    patches = Patches()
    _install(patches, strategy, None)
    try:
        yield
    finally:
        patches.undo()


def _install(patches: Patches, load: CopiesLoadStrategy, save: CopiesSaveStrategy | None) -> None:
    try:
        from megatron.core.dist_checkpointing.strategies.base import StrategyAction, register_default_strategy
    except ImportError as error:
        raise ImportError(
            "this Megatron-core has no default strategies: give CopiesSaveStrategy() and CopiesLoadStrategy() to "
            "dist_checkpointing.save and load as sharded_strategy"
        ) from error

    def make(original: Callable[[], None]) -> Callable[[], None]:
        def register_ours() -> None:
            original()
            register_default_strategy(StrategyAction.LOAD_SHARDED, *_BACKEND, load)
            if save is not None:
                register_default_strategy(StrategyAction.SAVE_SHARDED, *_BACKEND, save)

        return register_ours

    why = "Megatron-core registers its own strategies again before each look-up"
    patches.make([Patch(torch_strategies, "register_default_torch_strategies", make, why)])
