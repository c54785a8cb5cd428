"""How far up a recovery goes."""

from __future__ import annotations

import enum


class Rung(enum.IntEnum):
    """The level to which a recovery escalates."""

    IN_PROCESS = 0  # the block runs again in the living process
    OWN_STATE = 1  # ranks get new processes, to which the old ones hand their state
    PROCESS = 2  # a rank gets a new process, and its state from replicas
    NODE = 3  # another node replaces a lost one
    JOB = 4  # all ranks start again from storage

    @property
    def label(self) -> str:
        """The name of the rung in events and tables."""
        return self.name.lower().replace("_", "-")
