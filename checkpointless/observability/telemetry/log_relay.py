"""A relay for the package's log messages, which no thread waits for: a terminal may take none."""

from __future__ import annotations

import copy
import functools
import logging
import os
import sys
from types import TracebackType

from checkpointless.observability.telemetry.scribe import herald
from checkpointless.system.environment import LOG_LEVEL_ENV

_formatter = logging.Formatter()


class LogRelay(logging.Handler):
    """Passes the package's messages to the handlers that would get them without it, in a thread of this process.

    It has no lock that an exception raised by another thread could leave locked. In a process that is forked later,
    for example a data-loader worker, messages are handled at once, as without the relay. It is usable as a context
    manager.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pid = -1
        self._handlers: list[logging.Handler] = []
        self._propagates = True

    def createLock(self) -> None:
        """Create no lock: none is needed."""
        self.lock = None

    def install(self) -> None:
        """Replace the package's handlers."""
        package = logging.getLogger(PACKAGE)
        uninstall_relays()
        self._pid = os.getpid()
        self._handlers, self._propagates = package.handlers[:], package.propagate
        package.handlers[:] = [self]
        package.propagate = False
        herald.put(_begin)

    def uninstall(self) -> None:
        """Restore the package's handlers."""
        package = logging.getLogger(PACKAGE)
        if self in package.handlers:
            package.handlers[:] = self._handlers
            package.propagate = self._propagates

    def __enter__(self) -> LogRelay:
        self.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.uninstall()
        herald.close()

    def handle(self, record: logging.LogRecord) -> bool:
        """Pass ``record`` on without waiting. A record that comes while thousands wait for a disk is lost."""
        if os.getpid() != self._pid:
            self._pass_on(record)
            return True
        told = copy.copy(record)  # the message as it is now, without the objects it refers to
        told.msg, told.args = record.getMessage(), None
        if record.exc_info:
            told.exc_text = record.exc_text or _formatter.formatException(record.exc_info)
            told.exc_info = None
        return herald.put(functools.partial(self._pass_on, told), chatter=record.levelno < logging.WARNING)

    def _pass_on(self, record: logging.LogRecord) -> None:
        handlers = [*self._handlers, *(logging.getLogger().handlers if self._propagates else ())]
        if not handlers and logging.lastResort is not None:
            handlers = [logging.lastResort]
        for handler in handlers:
            if record.levelno >= handler.level:
                handler.handle(record)


def uninstall_relays() -> None:
    """Uninstall the relay of the process that this one was forked from, which hides the handlers that there are."""
    for relay in [each for each in logging.getLogger(PACKAGE).handlers if isinstance(each, LogRelay)]:
        relay.uninstall()


def _begin() -> None:
    """Do nothing; queued so that the thread starts at once, and not with the first message."""


# --- The log level of ranks and agents (``--log-level``) ----------------------------------------------------------

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
