"""NeMo's checkpoints with copies: kept by NeMo's checkpoint IO as it saves, and asked before storage in a load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.plugins import CheckpointIO
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.parallel_state import get_data_parallel_group
from nemo.lightning.io.pl import MegatronCheckpointIO
from nemo.lightning.resume import AutoResume
from nemo.utils.app_state import AppState
from typing_extensions import override

from checkpointless.inprocess import active_call_wrapper
from checkpointless.integrations.compat.lightning import WrappingCheckpointIO
from checkpointless.integrations.megatron.dist_checkpoint.copies import Copies
from checkpointless.integrations.megatron.dist_checkpoint.strategies import (
    CopiesLoadStrategy,
    CopiesSaveStrategy,
    loading,
)
from checkpointless.transfer.exchange import all_gather_json

_FORMAT = "torch_dist"
_COPIES = "_checkpointless_copies"  # where NeMo's checkpoint IO has the copies that it keeps


class KeepCopies(Callback):
    """Has NeMo's checkpoints kept in host memory, too, so that a load after a fault reads little from storage.

    It is to be given to the trainer as any callback. The copies outlive faults; every rank's memory takes what the
    rank writes to a checkpoint, times the replication factor, twice while a checkpoint is written.

    Args:
        disk: a directory on a disk of the node, or another place that ``open_store`` knows, in which copies are
            kept as well; "": there is none.
        replication_jump: the distance between ranks that keep copies for each other; 0: the number of ranks on a
            node, so that copies are on the next node.
        replication_factor: how many ranks keep each copy. 1: each rank keeps only its own, which dies with it.
    """

    def __init__(self, disk: str = "", replication_jump: int = 0, replication_factor: int = 1) -> None:
        self.disk, self.replication_jump, self.replication_factor = disk, replication_jump, replication_factor

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Have the trainer's checkpoint IO keep copies.

        Raises:
            ValueError: it saves no ``torch_dist`` checkpoints, or the ranks cannot be divided as asked.
            OSError: the directory cannot be made, or others can write to it.
        """
        copies = _copies(self.disk, self.replication_jump, self.replication_factor)
        keep_copies(trainer.strategy.checkpoint_io, copies)
        copies.prepare()


@cache
def _copies(disk: str, jump: int, factor: int) -> Copies:
    """Return the copies of this process, the same ones in every generation."""
    return Copies(disk=disk or None, replication_jump=jump, replication_factor=factor)


def keep_copies(checkpoint_io: CheckpointIO, copies: Copies | None = None) -> None:
    """Have NeMo's checkpoint IO keep copies of what it saves.

    Args:
        checkpoint_io: ``strategy.checkpoint_io``: NeMo's ``MegatronCheckpointIO``, in wrappers or not. It keeps its
            settings; only what it writes with is replaced.
        copies: where copies are kept; None: in the memory of this process.

    Raises:
        ValueError: it saves no ``torch_dist`` checkpoints.
    """
    io = _megatrons(checkpoint_io)
    if io is None:
        raise ValueError(f"no copies can be kept: {type(checkpoint_io).__name__} saves no {_FORMAT} checkpoints")

    def save_strategy() -> Any:
        settings = {} if io.torch_dist_multiproc is None else {"thread_count": io.torch_dist_multiproc}
        strategy: Any = CopiesSaveStrategy(copies=copies, cached_metadata=io.assume_constant_structure, **settings)
        if io.parallel_save:
            group = get_data_parallel_group(with_context_parallel=True) if io.parallel_save_within_dp else None
            strategy = FullyParallelSaveStrategyWrapper(strategy, group, io.assume_constant_structure)
        return strategy

    setattr(io, _COPIES, copies)
    io._save_sharded_strategy = None
    io._determine_dist_ckpt_save_strategy = save_strategy  # called at the first save, when there are process groups


@contextmanager
def loading_from_copies(checkpoint_io: CheckpointIO) -> Iterator[CopiesLoadStrategy | None]:
    """Have NeMo's checkpoint IO load from the copies that it keeps, or else from storage, in the context.

    Yields:
        The strategy that loads; None: nothing is changed, as ``torch_dist`` checkpoints are not loaded.
    """
    io = _megatrons(checkpoint_io)
    if io is None:
        yield None
        return
    strategy, parallel_load = CopiesLoadStrategy(copies=getattr(io, _COPIES, None)), io.parallel_load
    io.parallel_load = False  # ours reads each chunk once, too, and a strategy around it would hide the copies
    try:
        with loading(strategy):
            yield strategy
    finally:
        io.parallel_load = parallel_load


def _megatrons(checkpoint_io: CheckpointIO) -> MegatronCheckpointIO | None:
    """Return NeMo's checkpoint IO for ``torch_dist`` in its wrappers; None if it is another one."""
    inner: CheckpointIO | None = checkpoint_io
    while isinstance(inner, WrappingCheckpointIO):
        inner = inner.checkpoint_io
    return inner if isinstance(inner, MegatronCheckpointIO) and inner.save_ckpt_format == _FORMAT else None


# --- NeMo's auto-resume, put off until memory has been asked ------------------------------------------------------


@dataclass(kw_only=True)
class CheckpointlessAutoResume(AutoResume):
    """Looks for a checkpoint on storage only if recovery from memory is not possible.

    It takes all parameters of NeMo's ``AutoResume``. At the first start it does what ``AutoResume`` does; in a
    later generation it waits, as ``trainer.fresume``, until the checkpoint connector asks for it.
    """

    @override
    def setup(self, trainer: Any, model: Any = None, force_setup: bool = False) -> None:
        """Set the trainer's checkpoint path, or put that off.

        Args:
            force_setup: whether to set the path now in any case. Collective, after a fault: the folder is rank 0's,
                because NeMo's logger names one by the time on that rank only.
        """
        call = active_call_wrapper()
        is_again = call is not None and call.generation > 0
        if is_again and not force_setup:
            trainer.fresume = self
            return
        if is_again and dist.is_initialized():
            state = AppState()
            folder = all_gather_json(None if state.log_dir is None else str(state.log_dir))[0]
            state.log_dir = None if folder is None else Path(folder)
        super().setup(trainer, model)

    @property
    def looks_in(self) -> str:
        """The checkpoint, or the folder of checkpoints, that it resumes from."""
        folder = AppState().log_dir
        found = self.resume_from_path or self.resume_from_directory or (folder and Path(folder) / "checkpoints")
        return str(found or "no folder")
