"""Takes what the processes of a node print: pipes, and threads that pass it on to log files and the terminal."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

logger = logging.getLogger(__name__)

FILES = 4  # that the bytes of a rank's log are divided into: the log and, as long as there is room, older ones

_MOST_LINE_BYTES = 64 * 1024


class _LogFile:
    """A log of bounded size; what its disk does not take is left out, and a line says how much.

    A full file is renamed to ``NAME.1.log`` and so on; the oldest are deleted. With ``is_new``, a file that is
    there already is an older one, and not continued.
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


class _LineCopy:
    """Shows a rank's whole lines, states of a progress bar, and parts of long lines, with the rank in front."""

    def __init__(self, name: str, show: Callable[[bytes], None], where: Path) -> None:
        self._header, self._show, self._where = f"[{name}] ".encode(), show, where
        self._torn, self._was_returned = b"", False

    def write(self, data: bytes | bytearray, lost: int) -> None:
        """Show the lines that have come to their end, and how many bytes after them were lost."""
        lines = self._lines(bytes(data))
        if lost:
            lines += [self._torn] * bool(self._torn)
            lines.append(f"({lost} bytes are left out here; they are in {self._where})".encode())
            self._torn = b""
        self._put(lines)

    def close(self) -> None:
        self._put([self._torn] * bool(self._torn))
        self._torn = b""

    def _lines(self, data: bytes) -> list[bytes]:
        if data:
            rest = data.removeprefix(b"\n") if self._was_returned else data  # half of b"\r\n" came before
            data, self._was_returned = rest, data.endswith(b"\r")
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, torn = (self._torn + data).split(b"\n")
        long = len(torn) // _MOST_LINE_BYTES * _MOST_LINE_BYTES
        lines += [torn[:long]] * bool(long)
        self._torn = torn[long:]
        return lines

    def _put(self, lines: list[bytes]) -> None:
        most = _MOST_LINE_BYTES
        pieces = (line[at : at + most] for line in lines for at in range(0, len(line) or 1, most))
        if lines:
            self._show(b"".join(b"%s%s\n" % (self._header, piece) for piece in pieces))


def _write_all(descriptor: int, data: bytes) -> None:
    """Write until all is taken, also if another process has made the descriptor non-blocking."""
    at = 0
    while at < len(data):
        try:
            at += os.write(descriptor, memoryview(data)[at:])
        except BlockingIOError:
            takes_more = select.poll()
            takes_more.register(descriptor, select.POLLOUT)
            takes_more.poll()


_PIPE_BYTES = 1 << 20
_READ_BYTES = 64 * 1024
_TAIL_BYTES = 16 * 1024
_ROOM_BYTES = 4 << 20  # that wait for a disk or a terminal, of each rank
_DISK_PATIENCE_S = 0.25
_TURN_S = 0.25
_CLOSE_S = 5.0
_COMPLAIN_EVERY_S = 600.0


@dataclass
class _Source:
    sink: _LogFile | _LineCopy
    waiting: bytearray = field(default_factory=bytearray)
    lost: int = 0


class _Outlet:
    """A thread that hands output to sinks, which may block, and room of bounded size in which output waits.

    Whoever passes output on waits ``patience_s`` for room, and once until the thread has come to the sink again;
    what follows is lost until then.
    """

    def __init__(self, name: str, patience_s: float, complain: Callable[[], None]) -> None:
        self._patience_s, self._complain = patience_s, complain
        self._changed = threading.Condition()
        self._sources: list[_Source] = []
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.start = self._thread.start

    def to(self, sink: _LogFile | _LineCopy) -> Callable[[bytes], None]:
        """Return what passes output on to a sink, if there is room."""
        source = _Source(sink)
        with self._changed:
            self._sources.append(source)

        def put(data: bytes) -> None:
            def has_room() -> bool:
                return len(source.waiting) + len(data) <= _ROOM_BYTES

            with self._changed:
                self._changed.notify_all()
                was_lost = source.lost
                if not was_lost and self._changed.wait_for(has_room, self._patience_s):
                    source.waiting += data
                    return
                source.lost += len(data)
            if not was_lost:
                self._complain()

        return put

    def close(self) -> bool:
        """Hand out what waits, and end the thread; return whether this was done in time."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        is_closing = False
        while not is_closing:
            with self._changed:
                self._changed.wait_for(self._has_work, _TURN_S)
                is_closing = self._is_closing
                taken = [(source.sink, source.waiting, source.lost) for source in self._sources]
                for source in self._sources:
                    source.waiting, source.lost = bytearray(), 0
                self._changed.notify_all()
            for sink, data, lost in taken:
                try:
                    sink.write(data, lost)
                    if is_closing:
                        sink.close()
                except Exception:  # the edge of the thread: the output of other ranks still has to go out
                    logger.exception("output could not be passed on")

    def _has_work(self) -> bool:
        return self._is_closing or any(source.waiting or source.lost for source in self._sources)


class Printed:
    """What one rank prints, over all its processes: the pipe that they print to, and its last lines.

    This process holds both ends, so that there is one pipe, whatever processes the rank leaves running.
    """

    def __init__(self, path: Path, *outlets: Callable[[bytes], None]) -> None:
        self.path = path
        self._outlets = outlets
        self._lock = threading.Lock()
        self._tail = b""
        self.readable, self._writable = os.pipe()
        os.set_blocking(self.readable, False)
        with contextlib.suppress(OSError):  # an unprivileged user has this much for a limited number of pipes
            fcntl.fcntl(self._writable, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def begin(self) -> int:
        """Return the descriptor that a process which is being started shall print to; it is only lent."""
        self.take()
        self._tail = b""
        os.set_blocking(self._writable, True)  # whatever the process before it has set
        return self._writable

    def last_lines(self, count: int = 10) -> list[str]:
        """Return the last lines that the last process printed, also those that are still in the pipe."""
        self.take()
        return self._tail.decode(errors="replace").splitlines()[-count:]

    def take(self) -> None:
        """Pass on what the pipe holds."""
        with self._lock:
            for _ in range(_PIPE_BYTES // _READ_BYTES):  # and no more, if a process prints all the time
                try:
                    data = os.read(self.readable, _READ_BYTES)
                except BlockingIOError:
                    return
                self._tail = (self._tail + data)[-_TAIL_BYTES:]
                for put in self._outlets:
                    put(data)

    def close(self) -> None:
        os.close(self.readable)
        os.close(self._writable)


class Output:
    """Takes what the processes of a node print, to log files and to the terminal.

    A thread empties all pipes. It does not wait for a terminal, and for a disk only briefly, so that no rank does:
    one thread for the files and one for the terminal wait in its place, and what they cannot pass on is counted.
    ``most_bytes`` is the size of each log with its older files; logs of ``new_logs`` begin with this agent.
    """

    def __init__(
        self,
        folder: Path,
        node: int | None,
        most_bytes: int,
        *,
        new_logs: Collection[int],
        terminal: int | None,
        shown: Collection[int],
        say: Callable[[str], None],
    ) -> None:
        self._folder, self._most_bytes, self._new_logs = folder, most_bytes, new_logs
        self._terminal, self._shown_ranks, self._say = terminal, shown, say
        self._complained_s = -_COMPLAIN_EVERY_S
        too_slow = "its disk does not answer in time"
        self._files = _Outlet("checkpointless-logs", _DISK_PATIENCE_S, lambda: self._complain(too_slow))
        self._shown = _Outlet("checkpointless-shown", 0.0, lambda: None)
        self._reader = threading.Thread(target=self._read, name="checkpointless-output", daemon=True)
        self._poll, self._wake = select.epoll(), os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._wake, select.EPOLLIN)
        self._is_closing = False
        self._pipes: dict[int, Printed] = {}
        log = folder / ("zygote.log" if node is None else f"zygote-{node}.log")
        self.fork_server = self._empty(Printed(log, self._files.to(self._log_file(log, is_new=True))))

    def of_rank(self, rank: int) -> Printed:
        """Return what a rank prints; once for each rank."""
        log = self._folder / f"rank-{rank}.log"
        outlets = [self._files.to(self._log_file(log, is_new=rank in self._new_logs))]
        if self._terminal is not None and rank in self._shown_ranks:
            outlets.append(self._shown.to(_LineCopy(f"rank {rank}", self._show, log)))
        return self._empty(Printed(log, *outlets))

    def start(self) -> None:
        """Start the threads; what was printed before waits in the pipes."""
        for thread in (self._files, self._shown, self._reader):
            thread.start()

    def close(self) -> None:
        """Take what the pipes still hold, wait in bounded time until it is written and shown, and close them."""
        if self._reader.is_alive():
            self._is_closing = True
            os.eventfd_write(self._wake, 1)
            self._reader.join()  # it waits for nothing
            if not self._files.close():
                self._say(f"the disk of {self._folder} does not answer: the last output of the ranks is not kept")
            if not self._shown.close():
                self._say(
                    f"the last output of the ranks is not shown, because nobody reads it; it is in {self._folder}"
                )
        self._poll.close()
        os.close(self._wake)
        for printed in self._pipes.values():
            printed.close()

    def descriptors(self) -> list[int]:
        """Return the descriptors that a process which is forked from this one has to close."""
        return [self._poll.fileno(), self._wake, self.fork_server.readable]

    def _log_file(self, path: Path, *, is_new: bool) -> _LogFile:
        return _LogFile(path, self._most_bytes, self._complain, is_new=is_new)

    def _empty(self, printed: Printed) -> Printed:
        self._pipes[printed.readable] = printed
        self._poll.register(printed.readable, select.EPOLLIN)
        return printed

    def _read(self) -> None:
        while not self._is_closing:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._pipes:
                    self._take(self._pipes[descriptor])
        for printed in self._pipes.values():
            self._take(printed)

    def _take(self, printed: Printed) -> None:
        try:
            printed.take()
        except Exception:  # the edge of the thread: a rank that nobody reads would wait for ever
            logger.exception("what %s is for could not be read", printed.path)

    def _show(self, lines: bytes) -> None:
        if self._terminal is None:
            return
        try:
            _write_all(self._terminal, lines)
        except OSError as error:
            self._terminal = None
            self._say(f"the output of ranks is no longer shown: {error.strerror}; it is in {self._folder}")

    def _complain(self, why: str) -> None:
        if time.monotonic() - self._complained_s >= _COMPLAIN_EVERY_S:
            self._complained_s = time.monotonic()
            self._say(f"output of ranks is left out of {self._folder}: {why}; training goes on")
