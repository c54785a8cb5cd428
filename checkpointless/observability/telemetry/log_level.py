"""The log level of ranks and agents (``--log-level``)."""

from __future__ import annotations

import logging
import os
import sys

from checkpointless.system.environment import LOG_LEVEL_ENV

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
PACKAGE = "checkpointless"


def asked_for_level() -> int | None:
    """Return the :mod:`logging` level that ``--log-level`` sets for this process; None without the option."""
    return LEVELS.get(os.environ.get(LOG_LEVEL_ENV, ""))


def apply_log_level() -> None:
    """Write the package's messages in this process, from the requested level on, to standard error."""
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
