"""The package's own log messages, which nobody waits for: a rank's standard error is a file on a disk."""

from __future__ import annotations

import copy
import functools
import logging
import os
from types import TracebackType

from checkpointless.telemetry.log_level import PACKAGE
from checkpointless.telemetry.scribe import herald

_formatter = logging.Formatter()


class LogRelay(logging.Handler):
    """Has the package's messages handled by whoever would handle them, in a thread of this process.

    It has no lock that an exception raised by another thread could leave locked. In a process that is forked later,
    a worker of a data loader say, messages are handled at once, as without it. Usable as a context manager.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pid = -1
        self._handlers: list[logging.Handler] = []
        self._propagates = True

    def createLock(self) -> None:
        """None is needed."""
        self.lock = None

    def install(self) -> None:
        """Take the place of the package's handlers."""
        package = logging.getLogger(PACKAGE)
        for other in [each for each in package.handlers if isinstance(each, LogRelay)]:
            other.uninstall()  # that of the process which this one was forked from
        self._pid = os.getpid()
        self._handlers, self._propagates = package.handlers[:], package.propagate
        package.handlers[:] = [self]
        package.propagate = False
        herald.put(_begin)

    def uninstall(self) -> None:
        """Give it back."""
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
        """Pass ``record`` on; never waits. What comes while thousands wait for a disk is lost."""
        if os.getpid() != self._pid:
            self._pass_on(record)
            return True
        told = copy.copy(record)  # as it is now, without what it refers to
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


def _begin() -> None:
    """Nothing: so that the thread is there from the beginning, and not from the first message on."""
