"""NeMo's checkpoints with copies: kept by NeMo's checkpoint IO as it saves, and asked before storage in a load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.parallel_state import get_data_parallel_group
from nemo.lightning.io.pl import MegatronCheckpointIO

from checkpointless.megatron.dist_checkpoint import Copies, CopiesLoadStrategy, CopiesSaveStrategy
from checkpointless.megatron.dist_checkpoint.registration import loading

_FORMAT = "torch_dist"


def keep_copies(checkpoint_io: Any, copies: Copies | None = None) -> None:
    """Have NeMo's checkpoint IO keep copies of what it saves.

    Args:
        checkpoint_io: ``strategy.checkpoint_io``: NeMo's ``MegatronCheckpointIO``, in wrappers or not. It keeps its
            settings; only what it writes with is replaced.
        copies: where copies are kept; None: in the memory of this process.

    Raises:
        ValueError: it saves no ``torch_dist`` checkpoints.
    """
    io = megatrons(checkpoint_io)
    if io is None:
        raise ValueError(f"no copies can be kept: {type(checkpoint_io).__name__} saves no {_FORMAT} checkpoints")

    def save_strategy() -> Any:
        settings = {} if io.torch_dist_multiproc is None else {"thread_count": io.torch_dist_multiproc}
        strategy: Any = CopiesSaveStrategy(copies, cached_metadata=io.assume_constant_structure, **settings)
        if io.parallel_save:
            group = get_data_parallel_group(with_context_parallel=True) if io.parallel_save_within_dp else None
            strategy = FullyParallelSaveStrategyWrapper(strategy, group, io.assume_constant_structure)
        return strategy

    io._save_sharded_strategy = None
    io._determine_dist_ckpt_save_strategy = save_strategy  # called at the first save, when there are process groups


@contextmanager
def loading_from_copies(checkpoint_io: Any, copies: Copies | None = None) -> Iterator[CopiesLoadStrategy | None]:
    """Return a context in which NeMo's checkpoint IO loads from copies, and from storage what they lack.

    Args:
        checkpoint_io: ``strategy.checkpoint_io``. If it loads no ``torch_dist`` checkpoints, nothing is changed.
        copies: the copies; None: those of this process.

    Yields:
        The strategy that loads; None: nothing is changed.
    """
    io = megatrons(checkpoint_io)
    if io is None:
        yield None
        return
    strategy, parallel_load = CopiesLoadStrategy(copies=copies), io.parallel_load
    io.parallel_load = False  # ours reads each chunk once, too, and a strategy around it would hide the copies
    try:
        with loading(strategy):
            yield strategy
    finally:
        io.parallel_load = parallel_load


def megatrons(checkpoint_io: Any) -> MegatronCheckpointIO | None:
    """Return NeMo's checkpoint IO for ``torch_dist`` in its wrappers; None if it is another one."""
    while isinstance(checkpoint_io, _WrappingCheckpointIO):
        checkpoint_io = checkpoint_io.checkpoint_io
    fits = isinstance(checkpoint_io, MegatronCheckpointIO) and checkpoint_io.save_ckpt_format == _FORMAT
    return checkpoint_io if fits else None
