"""The fits of a block: a block may train in several, one after the other, whose steps are counted on."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from checkpointless.recovery.own.keeper import OwnStateKeeper
from checkpointless.recovery.own.state import OwnState
from checkpointless.transfer.exchange import share_plain


class FitKeeper(OwnStateKeeper):
    """Counts the fits of a block, and keeps how those ended that are over.

    Args:
        own: what is kept of a rank's own.

    Attributes:
        fit: the fit of the running block that is under way, counted from 1 (0: none has begun).
        finished: by fit, the non-tensor state in which the fit ended.
    """

    def __init__(self, own: OwnState) -> None:
        super().__init__(own)
        self.fit = 0
        self.finished: dict[int, dict[str, Any]] = {}

    @abstractmethod
    def finish_copies(self) -> None:
        """Finish the copies that are being made, and make no more of this training, which is over."""

    def begin_fit(self) -> None:
        """Begin a fit of the block. Its steps are counted on from those of the fits before it."""
        self.fit += 1
        self.offset = self.parameter_update_lock.committed + 1 if self.fit > 1 else 0

    def finish_fit(self, objects: dict[str, Any]) -> None:
        """Record that the fit under way is over, on all ranks.

        Args:
            objects: the non-tensor state in which the fit ended, for a block that is entered again later.
        """
        self.finished = {**self.finished, self.fit: objects}
        self.finish_copies()

    def finished_fit(self) -> dict[str, Any] | None:
        """Return the non-tensor state in which the fit under way ended before the fault. Collective.

        Returns:
            The state, from this rank's memory or a peer's; None if no rank has it.
        """
        objects: dict[str, Any] | None = share_plain(self.finished.get(self.fit))
        if objects is not None:
            self.finished = {**self.finished, self.fit: objects}
        return objects
