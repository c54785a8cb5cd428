"""An abort: an action that stops what a rank is doing while its main thread may be blocked in it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from checkpointless.inprocess.state import HPState


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
