"""The lines that are appended to a file, as they come."""

from __future__ import annotations

import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)


class LineTail:
    """The whole lines that were appended to a file since the last look.

    A last line without a newline is left for the next look. A file that became shorter, or another one in its
    place, is read from its beginning.

    Args:
        path: the file, which need not be there yet.
        max_bytes: how much is read at a time; a line that is longer is left out.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._inode, self._offset = -1, 0
        self._in_long_line = False
        self._complained = False
        try:
            found = path.stat()
        except OSError:
            return  # not there yet; should it be out of reach, the first look says so
        self._inode, self._offset = found.st_ino, found.st_size

    def lines(self) -> list[bytes]:
        """Those lines, without their newlines; none while the file cannot be read."""
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
