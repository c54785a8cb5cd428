"""The versions of Python, torch, the frameworks and NCCL, against what a recovery needs and what fits together."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

from checkpointless.doctor.findings import Family, Finding, Severity
from checkpointless.integrations.compat import BRIDGE, CORE, installed, untested
from checkpointless.system.nccl import problem_of_version

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

_finding = partial(Finding, Family.VERSIONS)


@dataclass(frozen=True)
class Torch:
    """What torch says of its build and of the machine.

    Attributes:
        nccl: version of the NCCL that it uses (empty: none).
        has_gpu: whether it can use a GPU.
        warning: what it warns of when it looks for one.
        error: why nothing is known ("" if it is).
    """

    nccl: tuple[int, ...] = ()
    has_gpu: bool = False
    warning: str = ""
    error: str = ""


@dataclass(frozen=True)
class _Versions:
    """The versions on a node.

    Attributes:
        python: version of this interpreter.
        packages: version of each installed package of :data:`PACKAGES`.
        needed: what checkpointless asks of each package, and of Python, as in ``>=2.6`` ("": any version).
        torch: what torch says; None if it is not installed.
        wants_gpu: whether there is a driver of NVIDIA's, and the job is to use it.
    """

    python: str
    packages: Mapping[str, str]
    needed: Mapping[str, str]
    torch: Torch | None = None
    wants_gpu: bool = False


def judge(versions: _Versions) -> list[Finding]:
    """Return what the versions mean for a recovery."""
    return [
        _of_package("Python", versions.python, versions.needed.get("Python", "")),
        *(_of_package(name, versions.packages.get(name), versions.needed.get(name, "")) for name in PACKAGES),
        *_of_rich(versions.packages),
        *_of_megatron(versions.packages),
        *([] if versions.torch is None else _of_torch(versions.torch, versions.wants_gpu)),
    ]


def read(cpu: bool = False) -> _Versions:
    """Read the versions of this machine; torch is imported in a child process, which takes seconds.

    Args:
        cpu: whether the job trains on CPUs although there may be GPUs.
    """
    packages = installed(PACKAGES)
    torch = _torch() if "torch" in packages else None
    return _Versions(platform.python_version(), packages, _needed(), torch, has_driver() and not cpu)


def has_driver() -> bool:
    """Return whether NVIDIA's kernel module is loaded."""
    return _DRIVER.exists()


def _of_package(name: str, version: str | None, needed: str) -> Finding:
    from packaging.specifiers import SpecifierSet

    install = f"pip install '{name}{needed}'"
    if version is None and name in _REQUIRED:
        return _finding(Severity.ERROR, f"{name} is not installed", _INSTALLED, install)
    if version is None:
        return _finding(Severity.OK, f"{name} is not installed; only jobs of its kind need it", _INSTALLED)
    if name in _JUDGED_TOGETHER:
        needed = ""
    if SpecifierSet(needed).contains(version, prereleases=True):
        return _finding(Severity.OK, f"{name} {version}", _INSTALLED)
    todo = "use another interpreter" if name == "Python" else install
    return _finding(Severity.ERROR, f"{name} {version}; checkpointless needs {needed}", _INSTALLED, todo)


def _of_rich(packages: Mapping[str, str]) -> list[Finding]:
    """Judge two versions together: Lightning before 2.5.3 clears a display of rich that later ones do not have."""
    from packaging.version import Version

    rich, lightning = packages.get("rich"), packages.get("lightning")
    if not rich or not lightning or Version(rich) < Version("14.1") or Version(lightning) >= Version("2.5.3"):
        return []
    seen = f"with rich {rich} and lightning {lightning}, a fit with RichProgressBar ends in an IndexError"
    todo = "pip install 'rich<14.1'; or 'lightning>=2.5.3', without NeMo 2.7"
    return [_finding(Severity.WARNING, seen, _INSTALLED, todo)]


def _of_megatron(packages: Mapping[str, str]) -> list[Finding]:
    """Judge Megatron-core together with the framework that it is installed for."""
    seen = untested(packages)
    todo = "install a pair that is tested; `checkpointless rehearse` shows whether this one is exact"
    return [] if seen is None else [_finding(Severity.WARNING, seen, _INSTALLED, todo)]


def _of_torch(torch: Torch, wants_gpu: bool) -> list[Finding]:
    if torch.error:
        todo = f"make `{Path(sys.executable).name} -c 'import torch'` work"
        return [_finding(Severity.ERROR, torch.error, _TORCH, todo)]
    if not torch.nccl:
        seen = "this build of torch has no NCCL: ranks meet over gloo"
        if wants_gpu:
            todo = "install a torch that is built for CUDA"
            return [_finding(Severity.WARNING, f"{seen}, though there is a GPU", _TORCH, todo)]
        return [_finding(Severity.OK, seen, _TORCH)]
    findings = [_finding(Severity.OK, f"NCCL {'.'.join(map(str, torch.nccl))}", _TORCH)]
    problem = problem_of_version(torch.nccl)
    if problem is not None:
        seen, _, todo = problem.partition("; ")
        findings = [_finding(Severity.WARNING, seen, _TORCH, todo)]
    if wants_gpu and not torch.has_gpu:
        why = f": {torch.warning}" if torch.warning else ""
        todo = "look at nvidia-smi; install a driver for torch's CUDA, or a torch for the driver's; or use --cpu"
        seen = f"there is NVIDIA's driver, and torch can use no GPU{why}"
        findings.append(_finding(Severity.ERROR, seen, _TORCH, todo))
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


def _torch() -> Torch:
    command = [sys.executable, "-W", "ignore", "-c", _ASK_TORCH]
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TORCH_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return Torch(error=f"torch was not imported within {TORCH_TIMEOUT_S:g} s")
    if ended.returncode != 0:
        last = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
        return Torch(error=f"torch cannot be imported: {last}")
    said = json.loads(ended.stdout.strip().splitlines()[-1])
    return Torch(**{**said, "nccl": tuple(said["nccl"])})
