"""How much ranks and agents log: ``--log-level``."""

from __future__ import annotations

import logging
import os
import sys

LOG_LEVEL_ENV = "CHECKPOINTLESS_LOG_LEVEL"
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
PACKAGE = "checkpointless"


def asked_for_level() -> int | None:
    """The level that ``--log-level`` asks this process for, as :mod:`logging` counts; None without it."""
    return LEVELS.get(os.environ.get(LOG_LEVEL_ENV, ""))


def apply_log_level() -> None:
    """Have this process's own messages from the level that is asked for on written to standard error."""
    level = asked_for_level()
    if level is None:
        return
    package = logging.getLogger(PACKAGE)
    package.setLevel(level)
    if not package.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        package.addHandler(handler)
        package.propagate = False
