"""A reader of the lines that are appended to a file."""

from __future__ import annotations

import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)


class LineTail:
    """Reads the complete lines that were appended to a file since the last call.

    A last line without a newline is left for the next call. A file that became shorter, or that was replaced by
    another one, is read from its beginning.

    Args:
        path: the file, which need not exist yet.
        max_bytes: number of bytes that one call reads at most; a longer line is skipped.
        from_start: whether what the file already contains is read too.
    """

    def __init__(self, path: Path, max_bytes: int, *, from_start: bool = False) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._inode, self._offset = -1, 0
        self._in_long_line = False
        self._complained = False
        if from_start:
            return
        try:
            found = path.stat()
        except OSError:
            return  # it does not exist yet; if it cannot be read, the first call warns
        self._inode, self._offset = found.st_ino, found.st_size

    def lines(self) -> list[bytes]:
        """Return the new lines without their newlines; none while the file cannot be read."""
        try:
            with self._path.open("rb") as log:
                found = os.fstat(log.fileno())
                if found.st_ino != self._inode or found.st_size < self._offset:
                    self._inode, self._offset, self._in_long_line = found.st_ino, 0, False
                log.seek(self._offset)
                data = log.read(self._max_bytes)
        except FileNotFoundError:
            return []
        except OSError as error:
            if not self._complained:
                logger.warning("what is appended to %s is not read: %s", self._path, error.strerror)
                self._complained = True
            return []
        self._complained = False
        whole, newline, torn = data.rpartition(b"\n")
        if not newline:
            if len(data) == self._max_bytes:
                self._offset += len(data)
                self._in_long_line = True
            return []
        self._offset += len(data) - len(torn)
        lines = whole.split(b"\n")
        if self._in_long_line:
            self._in_long_line = False
            return lines[1:]
        return lines
