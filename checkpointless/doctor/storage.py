"""The folders that a job needs: shared memory, temporary files and the run directory."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from checkpointless.doctor.findings import Family, Finding, Severity
from checkpointless.environment import TMPDIR_ENV
from checkpointless.posix.shared_memory import FOLDER as SHARED_MEMORY
from checkpointless.posix.temp_folder import LONGEST_TMPDIR
from checkpointless.telemetry.wording import duration, size

#: What NVIDIA gives a container for NCCL
#: (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html); data-loader workers hand
#: tensors over in the same memory.
LEAST_SHARED_BYTES = 10**9
_LEAST_FREE_BYTES = 100 * 10**6  # of a disk: logs, events, sockets
_SLOW_SYNC_S = 0.1
_PROBE = b"checkpointless doctor\n"


@dataclass(frozen=True)
class Folder:
    """What was read of a folder.

    Attributes:
        path: its path.
        total: size of its file system, in bytes.
        free: free bytes of it.
        sync_s: seconds that one small file took to be on the disk; None if that was not tried.
        error: why nothing can be written into it ("" if it can).
    """

    path: str
    total: int = 0
    free: int = 0
    sync_s: float | None = None
    error: str = ""


def read_folder(path: Path, sync: bool = False) -> Folder:
    """Read a folder, and write a small file into it, which is removed at once.

    Args:
        path: path of a folder that exists.
        sync: whether to wait until the file is on the disk, and measure how long that takes.
    """
    try:
        disk = os.statvfs(path)
        with tempfile.TemporaryFile(dir=path, prefix=".ckpl-doctor-") as file:
            began_s = time.perf_counter()
            file.write(_PROBE)
            file.flush()
            if sync:
                os.fsync(file.fileno())
            took_s = time.perf_counter() - began_s
    except OSError as error:
        return Folder(str(path), error=error.strerror or str(error))
    return Folder(str(path), disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize, took_s if sync else None)


def shared_memory(path: Path = SHARED_MEMORY) -> list[Finding]:
    """Look at the folder for shared memory."""
    return judge_shared_memory(read_folder(path))


def temporary_files(asked: str | None) -> list[Finding]:
    """Look at the folder for temporary files.

    Args:
        asked: value of ``TMPDIR``; None if it is not set.
    """
    path = Path(asked) if asked else Path(tempfile.gettempdir())
    return judge_temporary_files(read_folder(path), TMPDIR_ENV if asked else "the system's default")


def run_directory(path: Path) -> list[Finding]:
    """Look at a run directory, or at the folder in which it would be made."""
    there = next((place for place in (path, *path.absolute().parents) if place.exists()), Path("/"))
    return judge_run_directory(read_folder(there, sync=True))


def judge_shared_memory(folder: Folder) -> list[Finding]:
    """Return what the shared memory is enough for."""
    if folder.error:
        seen = f"{folder.path} cannot be written: {folder.error}"
        return [_finding(Severity.ERROR, seen, folder.path, "mount a tmpfs there; data-loader workers need it")]
    much = f"{folder.path} has {size(folder.total)}, {size(folder.free)} of it free"
    if folder.total < LEAST_SHARED_BYTES:
        seen = f"{much}: NCCL and data-loader workers die of SIGBUS when it is full"
        todo = f"give it {size(LEAST_SHARED_BYTES)} or more: docker --shm-size, a memory volume in Kubernetes"
        return [_finding(Severity.WARNING, seen, folder.path, todo)]
    if folder.free < LEAST_SHARED_BYTES:
        todo = f"remove what ended jobs left in {folder.path}, or give it more"
        return [_finding(Severity.WARNING, much, folder.path, todo)]
    return [_finding(Severity.OK, much, folder.path)]


def judge_temporary_files(folder: Folder, source: str) -> list[Finding]:
    """Return whether sockets of ranks and of their data-loader workers can be made.

    Args:
        folder: the folder for temporary files.
        source: where its path comes from.
    """
    findings = []
    length = len(os.fsencode(folder.path))
    if folder.error:
        todo = f"create {folder.path}, or set {TMPDIR_ENV} to a folder that can be written"
        severity = Severity.WARNING if source == TMPDIR_ENV else Severity.ERROR  # Python passes it over
        findings.append(_finding(severity, f"{folder.path} cannot be written: {folder.error}", source, todo))
    elif folder.free < _LEAST_FREE_BYTES:
        todo = f"free some space, or set {TMPDIR_ENV} to a folder with more"
        findings.append(_finding(Severity.WARNING, f"{folder.path} has {size(folder.free)} free", source, todo))
    if length > LONGEST_TMPDIR:
        seen = (
            f"the path {folder.path} has {length} bytes, of which a socket below it leaves room for "
            f"{LONGEST_TMPDIR}: sockets of killed processes stay behind"
        )
        todo = f"set {TMPDIR_ENV} to a shorter path, such as /tmp"
        findings.append(_finding(Severity.WARNING, seen, source, todo))
    seen = f"temporary files in {folder.path}, {size(folder.free)} free"
    return findings or [_finding(Severity.OK, seen, source)]


def judge_run_directory(folder: Folder) -> list[Finding]:
    """Return whether a run can be recorded."""
    source = "a file written there and removed"
    if folder.error:
        todo = "name another with --run-dir"
        return [_finding(Severity.ERROR, f"{folder.path} cannot be written: {folder.error}", source, todo)]
    if folder.free < _LEAST_FREE_BYTES:
        seen = f"the run directory's disk has {size(folder.free)} free"
        return [_finding(Severity.WARNING, seen, source, "free some space, or name another with --run-dir")]
    synced = f"the run directory's disk takes {duration(folder.sync_s)} for a small file"
    if folder.sync_s is not None and folder.sync_s > _SLOW_SYNC_S:
        todo = "expect slow checkpoints; events and logs wait for no disk"
        return [_finding(Severity.ADVICE, synced, source, todo)]
    return [_finding(Severity.OK, synced, source)]


def _finding(severity: Severity, seen: str, source: str, todo: str = "") -> Finding:
    return Finding(Family.STORAGE, severity, seen, source, todo)
