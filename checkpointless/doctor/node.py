"""Examines one node: versions, variables, folders, descriptors and forks; the quick checks also before each job."""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as OutOfTimeError
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

from checkpointless.doctor import forking
from checkpointless.doctor.findings import LONGEST, Family, Finding, Severity
from checkpointless.integrations.compat import BRIDGE, CORE, installed, untested
from checkpointless.launcher.agent.ranks.rank_process import Script
from checkpointless.observability.telemetry.scribe import in_thread
from checkpointless.observability.telemetry.wording import printable, size
from checkpointless.system.environment import (
    TMPDIR_ENV,
    TORCH_DISTRIBUTED_DEBUG_ENV,
    TORCH_NCCL_BLOCKING_WAIT_ENV,
    TORCH_YES,
)
from checkpointless.system.nccl import SETTINGS, is_torchruns, problem_of_version
from checkpointless.system.temp_folder import SHARED_MEMORY

TORCH_TIMEOUT_S = 120.0
#: The packages that a job depends on, by the names of their distributions; those after the first three are only
#: there for jobs of theirs.
PACKAGES = ("torch", "lightning", "rich", "nemo_toolkit", CORE, BRIDGE)
_REQUIRED = PACKAGES[:3]
_JUDGED_TOGETHER = PACKAGES[4:]
_OWN = "checkpointless"
_DRIVER = Path("/proc/driver/nvidia/version")
_INSTALLED, _TORCH = "installed packages", "torch, imported in a child process"

# Prints what only torch itself knows: its NCCL, and whether it can use a GPU or what it warns of instead.
_ASK_TORCH = """
import json, os, warnings
import torch, torch.distributed as dist
os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
with warnings.catch_warnings(record=True) as said:
    usable = torch.cuda.is_available()
there = dist.is_available() and dist.is_nccl_available()
from checkpointless.system.nccl import in_force
nccl = (in_force() or torch.cuda.nccl.version()) if there else ()
print(json.dumps({"nccl": nccl, "has_gpu": usable, "warning": str(said[-1].message) if said else ""}))
"""

_version_finding = partial(Finding, Family.VERSIONS)


@dataclass(frozen=True)
class _Torch:
    """What torch says of its build and of the machine; ``error`` says why nothing is known."""

    nccl: tuple[int, ...] = ()
    has_gpu: bool = False
    warning: str = ""
    error: str = ""


def _versions(cpu: bool) -> list[Finding]:
    """Return what the versions of this machine mean for a recovery."""
    packages, needed = installed(PACKAGES), _needed()
    pair = untested(packages)  # Megatron-core, and the framework that it is installed for
    todo = "install a pair that is tested; `checkpointless rehearse` shows whether this one is exact"
    return [
        _of_package("Python", platform.python_version(), needed.get("Python", "")),
        *(_of_package(name, packages.get(name), needed.get(name, "")) for name in PACKAGES),
        *([] if pair is None else [_version_finding(Severity.WARNING, pair, _INSTALLED, todo)]),
        *(_of_torch(_torch(), _has_driver() and not cpu) if "torch" in packages else []),
    ]


def _has_driver() -> bool:
    return _DRIVER.exists()


def _of_package(name: str, version: str | None, needed: str) -> Finding:
    from packaging.specifiers import SpecifierSet

    install = f"pip install '{name}{needed}'"
    if version is None and name in _REQUIRED:
        return _version_finding(Severity.ERROR, f"{name} is not installed", _INSTALLED, install)
    if version is None:
        return _version_finding(Severity.OK, f"{name} is not installed; only jobs of its kind need it", _INSTALLED)
    if name in _JUDGED_TOGETHER:
        needed = ""
    if SpecifierSet(needed).contains(version, prereleases=True):
        return _version_finding(Severity.OK, f"{name} {version}", _INSTALLED)
    todo = "use another interpreter" if name == "Python" else install
    return _version_finding(Severity.ERROR, f"{name} {version}; checkpointless needs {needed}", _INSTALLED, todo)


def _of_torch(torch: _Torch, wants_gpu: bool) -> list[Finding]:
    if torch.error:
        todo = f"make `{Path(sys.executable).name} -c 'import torch'` work"
        return [_version_finding(Severity.ERROR, torch.error, _TORCH, todo)]
    if not torch.nccl:
        seen = "this build of torch has no NCCL: ranks meet over gloo"
        if wants_gpu:
            todo = "install a torch that is built for CUDA"
            return [_version_finding(Severity.WARNING, f"{seen}, though there is a GPU", _TORCH, todo)]
        return [_version_finding(Severity.OK, seen, _TORCH)]
    findings = [_version_finding(Severity.OK, f"NCCL {'.'.join(map(str, torch.nccl))}", _TORCH)]
    problem = problem_of_version(torch.nccl)
    if problem is not None:
        seen, _, todo = problem.partition("; ")
        findings = [_version_finding(Severity.WARNING, seen, _TORCH, todo)]
    if wants_gpu and not torch.has_gpu:
        why = f": {torch.warning}" if torch.warning else ""
        todo = "look at nvidia-smi; install a driver for torch's CUDA, or a torch for the driver's; or use --cpu"
        seen = f"there is NVIDIA's driver, and torch can use no GPU{why}"
        findings.append(_version_finding(Severity.ERROR, seen, _TORCH, todo))
    return findings


def _needed() -> dict[str, str]:
    """Return what the installed checkpointless asks of other packages, and of Python, according to its metadata."""
    from packaging.requirements import Requirement

    try:
        own = metadata.metadata(_OWN)
    except metadata.PackageNotFoundError:
        return {}
    wanted = [Requirement(text) for text in own.get_all("Requires-Dist") or ()]
    wanted.sort(key=lambda each: "extra" not in str(each.marker))  # what all need comes last, and counts
    needed = {each.name: str(each.specifier) for each in wanted if each.name in PACKAGES}
    return {**needed, "Python": (own.get_all("Requires-Python") or [""])[0]}


def _torch() -> _Torch:
    command = [sys.executable, "-W", "ignore", "-c", _ASK_TORCH]
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TORCH_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return _Torch(error=f"torch was not imported within {TORCH_TIMEOUT_S:g} s")
    if ended.returncode != 0:
        last = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
        return _Torch(error=f"torch cannot be imported: {last}")
    said = json.loads(ended.stdout.strip().splitlines()[-1])
    return _Torch(**{**said, "nccl": tuple(said["nccl"])})


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
_storage = partial(Finding, Family.STORAGE)
_limit = partial(Finding, Family.LIMITS)


def _variables(environ: Mapping[str, str]) -> list[Finding]:
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


def _folders(environ: Mapping[str, str], run_dir: Path | None) -> list[Finding]:
    asked = environ.get(TMPDIR_ENV)
    source = TMPDIR_ENV if asked else "the system's default"
    temporary = Path(asked or tempfile.gettempdir())
    todo = f"create {temporary}, free some space, or set {TMPDIR_ENV} to a folder with more"
    findings = [
        _shared_memory(SHARED_MEMORY),
        # Python passes over one that is asked for and does not exist.
        _folder(temporary, LEAST_FREE_BYTES, source, todo, Severity.WARNING if asked else Severity.ERROR),
    ]
    if run_dir is not None:
        there = next(place for place in (run_dir, *run_dir.absolute().parents) if place.exists())
        todo = "free some space, or name another with --run-dir"
        findings.append(_folder(there, LEAST_FREE_BYTES, "--run-dir", todo))
    return findings


def _shared_memory(path: Path) -> Finding:
    todo = (
        f"remove what ended jobs left in {path}, or give it {size(LEAST_SHARED_BYTES)} or more (docker --shm-size, "
        "a memory volume in Kubernetes): NCCL and data-loader workers die of SIGBUS when it is full"
    )
    return _folder(path, LEAST_SHARED_BYTES, "shared memory", todo)


def _folder(path: Path, least: int, source: str, todo: str, severity: Severity = Severity.ERROR) -> Finding:
    """Look whether a folder can be written, and has enough free bytes; a small file is written and removed."""
    try:
        disk = os.statvfs(path)
        with tempfile.TemporaryFile(dir=path, prefix=".ckpl-doctor-") as file:
            file.write(b"checkpointless doctor\n")
    except OSError as error:
        return _storage(severity, f"{path} cannot be written: {error.strerror}", source, todo)
    free, total = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    seen = f"{path} has {size(total)}, {size(free)} of it free"
    return _storage(Severity.WARNING, seen, source, todo) if free < least else _storage(Severity.OK, seen, source)


def _open_files(files: int, hard: int, ranks: int) -> Finding:
    """Return whether processes may have enough descriptors, by their soft and hard limits."""
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


def _checked(family: Family, check: Callable[[], Sequence[Finding]], timeout_s: float) -> list[Finding]:
    """Return what a check finds; a check that fails or does not end in ``timeout_s`` is a finding itself."""
    try:
        return list(in_thread(check, f"doctor-{family.value}").result(timeout_s))
    except OutOfTimeError:
        seen, todo = f"the check did not end within {timeout_s:g} s", "look for a disk that does not answer"
    except Exception as error:  # noqa: BLE001 - whatever the check ran into is what is to be shown
        seen = printable(f"the check failed: {type(error).__name__}: {error}", LONGEST)
        todo = "report this line as a bug of checkpointless, unless it explains itself"
    return [Finding(family, Severity.WARNING, seen, f"check of {family.value}", todo)]


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
    """Examine this node, and its imports if any are named; ``progress`` hears of what takes over two seconds."""
    progress("asking torch for its versions, in a child process")
    long_s = TORCH_TIMEOUT_S + _QUICK_S
    findings = _checked(Family.VERSIONS, lambda: _versions(cpu), long_s)
    findings += _checked(Family.VARIABLES, lambda: _variables(os.environ), _QUICK_S)
    findings += _checked(Family.STORAGE, lambda: _folders(os.environ, run_dir), _QUICK_S)
    findings += _checked(Family.LIMITS, lambda: [_descriptors(ranks)], _QUICK_S)
    if not preload and script is None:
        seen = "imports were not tried: --script or --preload says what the fork server would import"
        return [*findings, Finding(Family.FORKING, Severity.OK, seen)]
    progress("importing in a child process what the fork server would (NeMo: 10 to 40 s)")
    return findings + _checked(
        Family.FORKING,
        lambda: forking.judge(forking.read(preload, script, ranks=ranks, cpu=cpu)),
        forking.TIMEOUT_S + _QUICK_S,
    )


def quick(ranks: int, cpu: bool, environ: Mapping[str, str]) -> list[Finding]:
    """Return the warnings and errors that cost no import; NCCL's variables matter only with a GPU."""
    found = [] if cpu or not _has_driver() else _variables(environ)
    found += [*_folders(environ, None), _descriptors(ranks)]
    return [each for each in found if each.is_to_change]


def _descriptors(ranks: int) -> Finding:
    return _open_files(*resource.getrlimit(resource.RLIMIT_NOFILE), ranks)
