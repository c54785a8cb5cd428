"""Examines one node: all families of checks, the quick ones also before each job.

What the environment and the kernel give to ranks: variables of torch and NCCL, folders, descriptors.
"""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from checkpointless.doctor import forking, versions
from checkpointless.doctor.findings import Family, Finding, Severity, checked
from checkpointless.launcher.agent.ranks.rank_process import Script
from checkpointless.observability.telemetry.wording import size
from checkpointless.system.environment import (
    TMPDIR_ENV,
    TORCH_DISTRIBUTED_DEBUG_ENV,
    TORCH_NCCL_BLOCKING_WAIT_ENV,
    TORCH_YES,
)
from checkpointless.system.nccl import SETTINGS, is_torchruns
from checkpointless.system.shared_memory import FOLDER as SHARED_MEMORY

_BY_USER, _BY_DEFAULT = "this environment", "the default that checkpointless sets"
_BY_TORCHRUN = "torchrun, which checkpointless overrules"
_BLOCKING = (TORCH_YES, "the host waits for every collective, and launches nothing meanwhile")
#: Values that harm, in lower case, and what happens with them. Those of SETTINGS harm with any value but one.
_HARMFUL: Mapping[str, tuple[tuple[str, ...], str]] = {
    TORCH_DISTRIBUTED_DEBUG_ENV: (
        ("detail",),
        "taken for INFO: torch would compare how often all ranks have used a group, and only some do for a fill",
    ),
    TORCH_NCCL_BLOCKING_WAIT_ENV: _BLOCKING,
    TORCH_NCCL_BLOCKING_WAIT_ENV.removeprefix("TORCH_"): _BLOCKING,  # its name before torch 2.2
}

#: What NVIDIA gives a container for NCCL
#: (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html); data-loader workers hand
#: tensors over in the same memory.
LEAST_SHARED_BYTES = 10**9
LEAST_FREE_BYTES = 100 * 10**6  # of a disk: logs, events, sockets

#: What the agent has open: its own files, and for each rank log, connection, board and pidfd, some of them twice
#: while a rank is replaced.
_AGENT_FILES, _FILES_PER_RANK = 64, 8
#: Linux' default. A rank holds one descriptor per connection to a peer, and one per tensor that its data-loader
#: workers hand over.
_USUAL_FILES = 1024

_variable = partial(Finding, Family.VARIABLES)
_folder = partial(Finding, Family.STORAGE)
_limit = partial(Finding, Family.LIMITS)


def variables(environ: Mapping[str, str]) -> list[Finding]:
    """Return what the variables of torch and NCCL mean for a recovery."""
    findings = []
    for name, setting in SETTINGS.items():
        value, source = environ.get(name, setting.value), _BY_USER if name in environ else _BY_DEFAULT
        if name in environ and is_torchruns(name, environ):
            value, source = setting.value, _BY_TORCHRUN
        findings.append(_of_variable(name, value, source, "" if value == setting.value else setting.otherwise))
    for name in sorted(set(environ) - set(SETTINGS)):
        value, (harmful, cost) = environ[name], _HARMFUL.get(name, ((), ""))
        if f"TORCH_{name}" in SETTINGS:
            seen, todo = f"{name}={value} is an old name: torch reads TORCH_{name} first", f"unset {name}"
            findings.append(_variable(Severity.ADVICE, seen, _BY_USER, todo))
        elif name in _HARMFUL or name.startswith(("TORCH_NCCL_", "NCCL_")):
            findings.append(_of_variable(name, value, _BY_USER, cost if value.lower() in harmful else ""))
    return findings


def _of_variable(name: str, value: str, source: str, cost: str) -> Finding:
    if cost:
        return _variable(Severity.WARNING, f"{name}={value}: {cost}", source, f"unset {name}")
    return _variable(Severity.OK, f"{name}={value}", source)


def folders(environ: Mapping[str, str], run_dir: Path | None) -> list[Finding]:
    """Look at the folders that a job needs.

    Args:
        run_dir: run directory, or where it would be made; None: not known.
    """
    asked = environ.get(TMPDIR_ENV)
    source = TMPDIR_ENV if asked else "the system's default"
    temporary = Path(asked or tempfile.gettempdir())
    todo = f"create {temporary}, free some space, or set {TMPDIR_ENV} to a folder with more"
    findings = [
        shared_memory(SHARED_MEMORY),
        # Python passes over one that is asked for and does not exist.
        folder(temporary, LEAST_FREE_BYTES, source, todo, Severity.WARNING if asked else Severity.ERROR),
    ]
    if run_dir is not None:
        there = next(place for place in (run_dir, *run_dir.absolute().parents) if place.exists())
        todo = "free some space, or name another with --run-dir"
        findings.append(folder(there, LEAST_FREE_BYTES, "--run-dir", todo))
    return findings


def shared_memory(path: Path) -> Finding:
    """Look at the folder for shared memory."""
    todo = (
        f"remove what ended jobs left in {path}, or give it {size(LEAST_SHARED_BYTES)} or more (docker --shm-size, "
        "a memory volume in Kubernetes): NCCL and data-loader workers die of SIGBUS when it is full"
    )
    return folder(path, LEAST_SHARED_BYTES, "shared memory", todo)


def folder(path: Path, least: int, source: str, todo: str, severity: Severity = Severity.ERROR) -> Finding:
    """Look whether a folder can be written, and has room; a small file is written, and removed at once.

    Args:
        least: how many free bytes are enough.
    """
    try:
        disk = os.statvfs(path)
        with tempfile.TemporaryFile(dir=path, prefix=".ckpl-doctor-") as file:
            file.write(b"checkpointless doctor\n")
    except OSError as error:
        return _folder(severity, f"{path} cannot be written: {error.strerror}", source, todo)
    free, total = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    seen = f"{path} has {size(total)}, {size(free)} of it free"
    return _folder(Severity.WARNING, seen, source, todo) if free < least else _folder(Severity.OK, seen, source)


def _open_files(files: int, hard: int, ranks: int) -> Finding:
    """Return whether processes may have enough descriptors.

    Args:
        files: how many a process may have (soft limit).
        hard: how far that may be raised.
    """
    source, needed = "ulimit -n", _AGENT_FILES + _FILES_PER_RANK * ranks
    if files == resource.RLIM_INFINITY:
        return _limit(Severity.OK, "any number of open files for each process", source)
    seen = f"{files:,} open files for each process"
    most = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    todo = f"ulimit -n {most} before the job starts"
    if most <= files:
        todo = "have the hard limit raised (limits.conf, docker --ulimit nofile=65536)"
    if files < needed:
        return _limit(Severity.ERROR, f"{seen}; an agent with {ranks} ranks needs {needed}", source, todo)
    if files < _USUAL_FILES:
        why = "connections to peers and tensors of data-loader workers take one each"
        return _limit(Severity.WARNING, f"{seen}: {why}", source, todo)
    return _limit(Severity.OK, seen, source)


_QUICK_S = 5.0  # for a check that only asks the kernel; a disk that is gone does not answer


def examine(
    *,
    ranks: int,
    run_dir: Path | None,
    cpu: bool,
    preload: tuple[str, ...],
    script: Script | None,
    progress: Callable[[str], None],
) -> list[Finding]:
    """Examine this node.

    Args:
        run_dir: run directory; None: not known.
        preload: names that the fork server imports.
        script: what the ranks run; None: not known. Without it and ``preload``, imports are not tried.
        progress: called with a line for people before whatever may take more than two seconds.
    """
    progress("asking torch for its versions, in a child process")
    long_s = versions.TORCH_TIMEOUT_S + _QUICK_S
    findings = checked(Family.VERSIONS, lambda: versions.judge(versions.read(cpu)), long_s)
    findings += checked(Family.VARIABLES, lambda: variables(os.environ), _QUICK_S)
    findings += checked(Family.STORAGE, lambda: folders(os.environ, run_dir), _QUICK_S)
    findings += checked(Family.LIMITS, lambda: [_descriptors(ranks)], _QUICK_S)
    if not preload and script is None:
        seen = "imports were not tried: --script or --preload says what the fork server would import"
        return [*findings, Finding(Family.FORKING, Severity.OK, seen)]
    progress("importing in a child process what the fork server would (NeMo: 10 to 40 s)")
    return findings + checked(
        Family.FORKING,
        lambda: forking.judge(forking.read(preload, script, ranks=ranks, cpu=cpu)),
        forking.TIMEOUT_S + _QUICK_S,
    )


def quick(ranks: int, cpu: bool, environ: Mapping[str, str]) -> list[Finding]:
    """Return the warnings and errors of the checks that take no time: nothing is imported.

    Where there is no GPU, the variables of NCCL have no effect and are left out.
    """
    found = [] if cpu or not versions.has_driver() else variables(environ)
    found += [*folders(environ, None), _descriptors(ranks)]
    return [each for each in found if each.is_to_change]


def _descriptors(ranks: int) -> Finding:
    return _open_files(*resource.getrlimit(resource.RLIMIT_NOFILE), ranks)
