"""Lower torch's debug level where it would make ranks fail that were not used alike.

With ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` torch wraps each group, and compares before each collective how many
operations every rank has begun in it (torch's ``ProcessGroupWrapper.cpp``). Messages between two ranks count, too.
A rank that is filled, and the one that fills it, exchange some that no other rank takes part in.
"""

from __future__ import annotations

import logging

import torch.distributed as dist

from checkpointless.environment import TORCH_DISTRIBUTED_DEBUG_ENV

logger = logging.getLogger(__name__)


class DebugLevel:
    """Has torch make groups that it does not wrap."""

    def __init__(self) -> None:
        self._is_lowered = False

    def install(self) -> None:
        """Replace the level ``DETAIL`` by ``INFO``, and say so (idempotent)."""
        if dist.get_debug_level() == dist.DebugLevel.DETAIL:
            logger.warning(
                "%s=DETAIL is taken for INFO: torch would compare how often all ranks have used a group, "
                "and only some do to fill a rank",
                TORCH_DISTRIBUTED_DEBUG_ENV,
            )
            dist.set_debug_level(dist.DebugLevel.INFO)
            self._is_lowered = True

    def uninstall(self) -> None:
        """Restore the level."""
        if self._is_lowered:
            dist.set_debug_level(dist.DebugLevel.DETAIL)
            self._is_lowered = False
