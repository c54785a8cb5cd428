"""The error of a save that has failed on every rank."""

from __future__ import annotations

from collections.abc import Mapping


class SaveFailed(Exception):
    """A checkpoint could not be saved, as all ranks know.

    Args:
        path: where it was to be saved.
        reasons: what went wrong, by rank.
    """

    def __init__(self, path: str, reasons: Mapping[int, str]) -> None:
        super().__init__(path, reasons)
        self.path = path
        self.reasons = reasons

    def __str__(self) -> str:
        rank = min(self.reasons)
        return (
            f"checkpoint {self.path.removesuffix('.ckpt')} could not be saved (rank {rank}: {self.reasons[rank]})"
        )
