"""The block that is running, and its manager."""

from __future__ import annotations

from typing import cast

from checkpointless.inprocess import HPCallWrapper, active_call_wrapper
from checkpointless.recovery.manager import CheckpointManager


class BuildAnewError(RuntimeError):
    """Raised where a model was kept that must not be used; the block is entered once more, without it."""


def manager_of(call: HPCallWrapper | None) -> CheckpointManager | None:
    """Return the manager that keeps the state of the running block.

    Args:
        call: the running wrapper, or None outside of a block.

    Returns:
        None outside of a block, and as long as nothing in the block keeps its state.
    """
    return cast("CheckpointManager | None", call.checkpoint_manager) if call is not None else None


def running_block(call: HPCallWrapper | None) -> HPCallWrapper:
    """Return ``call``, or the wrapper whose block is running in this process if it is None.

    Raises:
        ValueError: it is None, and no block is running.
    """
    call = call if call is not None else active_call_wrapper()
    if call is None:
        raise ValueError("no block is running: train inside of a function that @HPWrapper() wraps")
    return call
