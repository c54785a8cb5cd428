"""The limits of processes (``ulimit``) and of the control group, against what the ranks of a node need."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

from checkpointless.doctor.findings import Family, Finding, Severity

_CGROUP = Path("/sys/fs/cgroup")
_RDMA = Path("/sys/class/infiniband")
#: What the agent has open: its own files, and for each rank log, connection, board and pidfd, some of them twice
#: while a rank is replaced.
_AGENT_FILES, _FILES_PER_RANK = 64, 8
#: Linux' default. A rank holds one descriptor per connection to a peer, and one per tensor that its data-loader
#: workers hand over.
_USUAL_FILES = 1024
#: Threads and processes of a rank, estimated from above: torch's, NCCL's and the data loader's.
_PROCESSES_PER_RANK = 256


@dataclass(frozen=True)
class Limits:
    """The limits of this process, which its children inherit; None: unlimited.

    Attributes:
        files: how many descriptors a process may have (soft limit).
        files_hard: how far that may be raised.
        processes: how many more processes and threads the control group and the user may have.
        locked_bytes: how much memory a process may lock.
        has_rdma: whether there is a network that needs locked memory.
        has_gpu: whether there is a GPU.
    """

    files: int | None
    files_hard: int | None
    processes: int | None
    locked_bytes: int | None
    has_rdma: bool
    has_gpu: bool


def judge(limits: Limits, ranks: int) -> list[Finding]:
    """Return what the limits are too low for.

    Args:
        limits: the limits.
        ranks: number of ranks on the node.
    """
    return [_files(limits, ranks), _processes(limits, ranks), _locked(limits)]


def read(has_gpu: bool, cgroup: Path = _CGROUP, rdma: Path = _RDMA) -> Limits:
    """Read the limits of this process.

    Args:
        has_gpu: whether there is a GPU.
        cgroup: folder of the control group.
        rdma: folder with the kernel's RDMA devices.
    """
    files, files_hard = map(_known, resource.getrlimit(resource.RLIMIT_NOFILE))
    locked, _ = map(_known, resource.getrlimit(resource.RLIMIT_MEMLOCK))
    users, _ = map(_known, resource.getrlimit(resource.RLIMIT_NPROC))
    left = [each for each in (_left_in(cgroup), users) if each is not None]
    return Limits(
        files, files_hard, min(left, default=None), locked, rdma.is_dir() and any(rdma.iterdir()), has_gpu
    )


def _files(limits: Limits, ranks: int) -> Finding:
    source = "ulimit -n"
    if limits.files is None:
        return _finding(Severity.OK, "any number of open files", source)
    seen = f"{limits.files:,} open files for each process"
    higher = limits.files_hard if limits.files_hard is None or limits.files_hard > limits.files else 0
    todo = "have the hard limit raised (limits.conf, docker --ulimit nofile=65536)"
    if higher != 0:
        todo = f"ulimit -n {65536 if higher is None else min(higher, 65536)} before the job starts"
    if limits.files < _AGENT_FILES + _FILES_PER_RANK * ranks:
        needed = _AGENT_FILES + _FILES_PER_RANK * ranks
        return _finding(Severity.ERROR, f"{seen}; an agent with {ranks} ranks needs {needed}", source, todo)
    if limits.files < _USUAL_FILES:
        why = "connections to peers and tensors of data-loader workers take one each"
        return _finding(Severity.WARNING, f"{seen}: {why}", source, todo)
    if limits.files == _USUAL_FILES and limits.has_gpu:
        return _finding(Severity.ADVICE, f"{seen}: large jobs need more", source, todo)
    return _finding(Severity.OK, seen, source)


def _processes(limits: Limits, ranks: int) -> Finding:
    source = "ulimit -u, pids.max"
    needed = ranks * _PROCESSES_PER_RANK
    if limits.processes is None or limits.processes >= needed:
        left = "any number of" if limits.processes is None else f"{limits.processes:,}"
        return _finding(Severity.OK, f"{left} more processes and threads", source)
    seen = f"{limits.processes:,} more processes and threads; {ranks} ranks take up to {needed:,}"
    return _finding(Severity.WARNING, seen, source, "raise ulimit -u, or the pids limit of the container")


def _locked(limits: Limits) -> Finding:
    source = "ulimit -l"
    if limits.locked_bytes is None:
        return _finding(Severity.OK, "any amount of locked memory", source)
    seen = f"{limits.locked_bytes // 1024:,} KiB of locked memory"
    todo = "ulimit -l unlimited (docker --ulimit memlock=-1)"
    if limits.has_rdma:
        return _finding(Severity.WARNING, f"{seen}: NCCL cannot register its buffers for RDMA", source, todo)
    if limits.has_gpu:
        return _finding(Severity.ADVICE, f"{seen}: drivers may refuse pinned memory", source, todo)
    return _finding(Severity.OK, f"{seen}; no RDMA network needs more", source)


def _left_in(cgroup: Path) -> int | None:
    """Return how many more processes the control group (version 2) may have; None if that is not known."""
    try:
        most = (cgroup / "pids.max").read_text().strip()
        current = int((cgroup / "pids.current").read_text())
    except (OSError, ValueError):
        return None
    return int(most) - current if most.isdigit() else None


def _known(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def _finding(severity: Severity, seen: str, source: str, todo: str = "") -> Finding:
    return Finding(Family.LIMITS, severity, seen, source, todo)
