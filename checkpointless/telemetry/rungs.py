"""How far up a recovery goes."""

from __future__ import annotations

import enum


class Rung(enum.IntEnum):
    """The level to which a recovery escalates."""

    IN_PROCESS = 0  # the block runs again in the living process
    PROCESS = 1  # a rank gets a new process
    NODE = 2  # another node replaces a lost one
    JOB = 3  # all ranks start again from storage

    @property
    def label(self) -> str:
        """The name of the rung in events and tables."""
        return self.name.lower().replace("_", "-")
