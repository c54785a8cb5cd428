"""The output of ranks: the log files that it goes to, their last lines, and their copy on the agent's output."""

from __future__ import annotations

import functools
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TextIO

from checkpointless.posix.errands import Errands

logger = logging.getLogger(__name__)

_TAIL_BYTES = 16 * 1024
_COPY_EVERY_S = 0.05
_TORN_S = 1.0  # a line without an end is shown after this time, and ended
_LOOK_S = 1.0


class LogFolder:
    """The folder of a run directory that the output of ranks and zygotes goes to.

    Args:
        run_dir: the run directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "logs"

    def make(self) -> None:
        """Create the folder if it does not exist.

        Raises:
            OSError: it cannot be created.
        """
        self._folder.mkdir(parents=True, exist_ok=True)

    def of_rank(self, rank: int) -> Path:
        """Return the path of a rank's log."""
        return self._folder / f"rank-{rank}.log"

    def of_zygote(self, node: int | None) -> Path:
        """Return the path of the log of a node's zygote.

        Args:
            node: the node's number; None if it is the job's only node.
        """
        return self._folder / ("zygote.log" if node is None else f"zygote-{node}.log")

    def begin(self, ranks: Iterable[int]) -> bool:
        """Begin empty logs, and move away those that this node's lost predecessor left in a shared run directory.

        Args:
            ranks: the ranks whose logs begin.

        Returns:
            True, as soon as the disk has answered.
        """
        for rank in ranks:
            log = self.of_rank(rank)
            _keep_old(log)
            log.write_bytes(b"")
        return True


class RankLog:
    """The log file of a rank. A disk that does not answer blocks neither the start of a rank nor the agent.

    Args:
        path: path of the file.
        errands: runs what accesses the file's disk.
        say: called with each line for the terminal.

    Attributes:
        path: path of the file.
    """

    def __init__(self, path: Path, errands: Errands, say: Callable[[str], None]) -> None:
        self.path = path
        self._errands = errands
        self._say = say
        self._instead: int | None = None
        self._begin = 0  # where the output of the process that was started last begins

    def open(self) -> int:
        """Return a descriptor for the output of a process that is being started; the caller closes it.

        If the file cannot be opened now, the output goes to an unnamed temporary file, which disappears with the
        process, or nowhere if that cannot be made either.
        """
        self.close()
        why = "its disk does not answer"
        try:
            found = self._errands.run(self._open, None, late=_close)
        except OSError as error:
            found, why = None, error.strerror or str(error)
        if found is not None:
            return found
        self._say(f"{self.path} cannot be written: {why}; what the rank prints is not kept there")
        try:
            self._instead, path = tempfile.mkstemp(prefix="checkpointless-")
        except OSError as error:
            logger.warning("nor among the temporary files: %s", error)
            return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.unlink(path)
        return os.dup(self._instead)

    def last_lines(self, count: int = 10) -> list[str]:
        """Return the last lines that the last process printed, or one line that says why they cannot be read."""
        if self._instead is not None:
            return _end(self._instead, 0)[-count:]
        try:
            lines = self._errands.run(self._read, None)
        except OSError as error:
            return [f"{self.path} cannot be read: {error.strerror or error}"]
        return [f"{self.path} cannot be read: its disk does not answer"] if lines is None else lines[-count:]

    def close(self) -> None:
        """Close the temporary file, if the output went to one."""
        if self._instead is not None:
            os.close(self._instead)
            self._instead = None

    def _open(self) -> int | None:
        log = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._begin = os.fstat(log).st_size
        return log

    def _read(self) -> list[str] | None:
        log = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _end(log, self._begin)
        finally:
            os.close(log)


class LogCopies:
    """Copies what ranks print, line by line with the rank in front, in separate threads.

    Args:
        paths: path of each rank's log.
        out: stream that the logs are copied to.
        errands: runs what accesses the disk of the logs.
    """

    def __init__(self, paths: Mapping[int, Path], out: TextIO, errands: Errands) -> None:
        self._paths, self._errands = paths, errands
        self._finished = threading.Event()
        self._threads = [
            threading.Thread(
                target=_copy,
                args=(path, f"[rank {rank}] ", out, self._finished),
                name=f"checkpointless-log-{rank}",
                daemon=True,
            )
            for rank, path in paths.items()
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> bool:
        """Copy what is left, however long ``out`` takes to accept it, and end the threads.

        Returns:
            False if the disk does not answer; what is left is then not copied.
        """
        self._finished.set()
        for thread, path in zip(self._threads, self._paths.values(), strict=True):
            thread.join(_LOOK_S)
            while thread.is_alive():
                if not self._errands.run(functools.partial(_answers, path), False):
                    return False
                thread.join(_LOOK_S)
        return True


def _copy(path: Path, header: str, out: TextIO, finished: threading.Event) -> None:
    """Copy the lines of a log as they are written, until ``finished`` is set and the end is reached.

    Only whole lines are written to ``out``, so that nothing is ever added to one. A state of a progress bar, which
    ends in a carriage return, is a line.
    """
    while not path.exists():
        if finished.wait(_COPY_EVERY_S):
            return
    with path.open(errors="replace") as log:
        torn, since_s, was_ended = "", 0.0, False
        while True:
            is_last = finished.is_set()  # before the log is read: what was written until then is copied
            piece = log.readline()
            torn += piece
            if torn.endswith("\n"):
                if not (was_ended and torn == "\n"):
                    out.write(f"{header}{torn}")
                torn, was_ended = "", False
            elif piece:
                since_s = time.monotonic()
            elif torn and (is_last or time.monotonic() - since_s > _TORN_S):
                out.write(f"{header}{torn}\n")
                torn, was_ended = "", True
            elif is_last:
                return
            else:
                time.sleep(_COPY_EVERY_S)


def _keep_old(log: Path) -> None:
    """Move the log away, if there is one."""
    if log.exists():
        count = len(list(log.parent.glob(f"{log.stem}.*.log")))
        log.rename(log.with_name(f"{log.stem}.{count + 1}.log"))


def _answers(path: Path) -> bool:
    """Return True as soon as the disk of ``path`` answers, if only with an error."""
    try:
        with path.open("rb", buffering=0) as log:
            log.seek(-1, os.SEEK_END)
            log.read(1)
    except OSError as error:
        logger.info("%s: %s", path, error)
    return True


def _close(log: int | None) -> None:
    if log is not None:
        os.close(log)


def _end(log: int, begin: int) -> list[str]:
    size = os.fstat(log).st_size
    start = max(begin if begin <= size else 0, size - _TAIL_BYTES)  # it may have been cut off meanwhile
    return os.pread(log, _TAIL_BYTES, start).decode(errors="replace").splitlines()
