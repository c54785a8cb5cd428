"""What the engine asks of whatever keeps the training state across restarts."""

from __future__ import annotations

from typing import Protocol


class StateKeeper(Protocol):
    """Keeps the state of training from one run of the block to the next.

    :class:`checkpointless.recovery.CheckpointManager` is one. The engine itself knows nothing about the state.
    """

    def hold(self, error: BaseException | None = None) -> None:
        """Take hold of the state that the block leaves behind.

        It runs in the main thread after the abort, before the frames of the block are cleared and before anything
        is cleaned up.

        Args:
            error: the exception that ended the block.
        """

    def hand_over(self, high_water: int) -> tuple[int, str]:
        """Hand the state to a successor of this process, which ends.

        Args:
            high_water: the highest optimizer step that any rank was ever seen to commit (-1: none).

        Returns:
            How many bytes that took (0: there is no state yet), and why it could not be done ("": it was).
        """

    def end(self) -> None:
        """Let go of everything that was kept for a fault, since the block has returned on all ranks."""
