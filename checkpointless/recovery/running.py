"""The manager of the block that is running."""

from __future__ import annotations

from typing import cast

from checkpointless.inprocess import HPCallWrapper
from checkpointless.recovery.manager import CheckpointManager


def manager_of(call: HPCallWrapper | None) -> CheckpointManager | None:
    """Return the manager that keeps the state of the running block.

    Args:
        call: the running wrapper, or None outside of a block.

    Returns:
        None outside of a block, and as long as nothing in the block keeps its state.
    """
    return cast("CheckpointManager | None", call.checkpoint_manager) if call is not None else None
