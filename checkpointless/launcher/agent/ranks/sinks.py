"""Where the output of ranks goes: log files of bounded size, and whole lines on the terminal."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from pathlib import Path

FILES = 4  # that the bytes of a rank's log are divided into: the log and, as long as there is room, older ones

_MOST_LINE_BYTES = 64 * 1024
_TORN_S = 1.0


class LogFile:
    """A log of bounded size. What its disk does not take is left out, and a line of the log says how much.

    A full file is renamed to ``NAME.1.log``, ``NAME.2.log`` and so on; the oldest are deleted.

    Args:
        path: the file, ``NAME.log``.
        most_bytes: size of the file and the older ones together.
        complain: called with the reason whenever output is left out.
        is_new: whether a file that is there already is an older one, and not to be continued.
    """

    def __init__(self, path: Path, most_bytes: int, complain: Callable[[str], None], *, is_new: bool) -> None:
        self._path, self._complain = path, complain
        self._most = most_bytes
        self._is_full = is_new
        self._log: int | None = None
        self._size = self._missing = 0

    def write(self, data: bytes | bytearray, lost: int) -> None:
        """Append output, and note how many bytes after it were lost on their way here."""
        gap = f"\n[checkpointless: {self._missing} bytes of output are missing here]\n".encode()
        if self._missing and not self._append(gap):
            self._missing = 0
        self._missing += (len(data) if self._missing else self._append(data)) + lost

    def close(self) -> None:
        """Say what is still missing, and close the file."""
        self.write(b"", 0)
        self._release()

    def _append(self, data: bytes | bytearray) -> int:
        """Append output, file by file and whole lines if possible; return how many bytes of it are lost."""
        at, end = 0, 0
        try:
            log = self._opened()
            while at < len(data):
                room = self._most // FILES - self._size
                end = len(data) if len(data) - at <= room else data.rfind(b"\n", at, at + max(room, 0)) + 1
                if end <= at and self._size:
                    self._is_full = True
                    log = self._opened()
                    continue
                count = os.write(log, memoryview(data)[at : end if end > at else at + room])
                at, self._size = at + count, self._size + count
        except OSError as error:
            self._release()
            self._complain(error.strerror or str(error))
        return len(data) - at

    def _opened(self) -> int:
        if self._is_full:
            self._release()
            self._keep_old()
            self._is_full = False
        if self._log is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._log = os.open(self._path, flags, 0o644)
            self._size = os.fstat(self._log).st_size
        return self._log

    def _keep_old(self) -> None:
        there = self._path.parent.glob(f"{self._path.stem}.*.log")
        old = {int(path.suffixes[-2][1:]): path for path in there if path.suffixes[-2][1:].isdecimal()}
        if self._path.exists():
            number = max(old, default=0) + 1
            old[number] = self._path.rename(self._path.with_name(f"{self._path.stem}.{number}.log"))
        sizes = {path: path.stat().st_size for _, path in sorted(old.items())}
        for path in [*sizes]:
            if sum(sizes.values()) > self._most - self._most // FILES:
                path.unlink()
                del sizes[path]

    def _release(self) -> None:
        if self._log is not None:
            os.close(self._log)
            self._log = None


class LineCopy:
    """Shows the lines of a rank with the rank in front.

    Only whole lines are shown, so that nothing is ever added to one. A state of a progress bar, which ends in a
    carriage return, is a line. So is a piece of a very long line, and of one that has no end after a second.

    Args:
        name: what stands in front of each line.
        show: called with whole lines.
        where: where all output is found, for the line that says how much is left out here.
    """

    def __init__(self, name: str, show: Callable[[bytes], None], where: Path) -> None:
        self._header, self._show, self._where = f"[{name}] ".encode(), show, where
        self._torn, self._since_s = b"", 0.0
        self._was_returned = self._was_ended = False

    def write(self, data: bytes | bytearray, lost: int) -> None:
        """Show the lines that have come to their end, and how many bytes after them were lost."""
        lines = self._lines(bytes(data))
        if lost:
            lines += [self._torn] * bool(self._torn)
            lines.append(f"({lost} bytes are left out here; they are in {self._where})".encode())
            self._torn = b""
        self._put(lines)

    def close(self) -> None:
        """Show what is left of the last line."""
        self._put([self._torn] * bool(self._torn))
        self._torn = b""

    def _lines(self, data: bytes) -> list[bytes]:
        now_s = time.monotonic()
        if data:
            rest = data.removeprefix(b"\n") if self._was_returned else data  # half of b"\r\n" came before
            data, self._was_returned = rest, data.endswith(b"\r")
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if data and not self._torn:
            self._since_s = now_s
        *lines, torn = (self._torn + data).split(b"\n")
        if lines:
            if self._was_ended and not lines[0]:  # it ends what has been shown
                del lines[0]
            self._was_ended, self._since_s = False, now_s
        long = len(torn) // _MOST_LINE_BYTES * _MOST_LINE_BYTES
        if torn and not long and now_s - self._since_s >= _TORN_S:
            long = len(torn)
        if long:
            lines.append(torn[:long])
            self._was_ended, self._since_s = True, now_s
        self._torn = torn[long:]
        return lines

    def _put(self, lines: list[bytes]) -> None:
        most = _MOST_LINE_BYTES
        pieces = (line[at : at + most] for line in lines for at in range(0, len(line) or 1, most))
        if lines:
            self._show(b"".join(b"%s%s\n" % (self._header, piece) for piece in pieces))


def write_all(descriptor: int, data: bytes) -> None:
    """Write to a terminal, pipe or file until all is taken, also if another process has made it non-blocking.

    Raises:
        OSError: nobody takes it any more.
    """
    at = 0
    while at < len(data):
        try:
            at += os.write(descriptor, memoryview(data)[at:])
        except BlockingIOError:
            takes_more = select.poll()
            takes_more.register(descriptor, select.POLLOUT)
            takes_more.poll()
