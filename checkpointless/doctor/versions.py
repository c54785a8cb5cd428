"""The versions of Python, torch, the frameworks, NCCL, CUDA and the driver, against what a recovery needs."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from checkpointless.doctor.findings import Family, Finding, Severity
from checkpointless.nccl import problem_of_version

TORCH_TIMEOUT_S = 120.0
#: The packages that a job depends on, by the names of their distributions; those after the first three are only
#: there if NeMo is.
PACKAGES = ("torch", "lightning", "rich", "nemo_toolkit", "megatron-core")
_REQUIRED = PACKAGES[:3]
_OWN = "checkpointless"
_DRIVER = Path("/proc/driver/nvidia/version")

# Prints what only torch itself knows; no call of it initialises CUDA.
_ASK_TORCH = """
import json, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
there = dist.is_available() and dist.is_nccl_available()
nccl = torch.cuda.nccl.version() if there else ()
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda or "", "nccl": list(nccl)}))
"""


@dataclass(frozen=True)
class Torch:
    """What torch says of its build.

    Attributes:
        version: its own version.
        cuda: version of CUDA that it was built for ("": none).
        nccl: version of the NCCL that it uses (empty: none).
        error: why nothing is known ("" if it is).
    """

    version: str = ""
    cuda: str = ""
    nccl: tuple[int, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class Versions:
    """The versions on a node.

    Attributes:
        python: version of this interpreter.
        packages: version of each installed package of :data:`PACKAGES`.
        needed: what checkpointless asks of each package, as in ``>=2.6`` ("": any version).
        needed_python: what it asks of Python.
        torch: what torch says; None if it was not asked.
        driver: version of NVIDIA's driver ("": there is none, or it is not known).
        driver_cuda: newest version of CUDA that the driver supports ("": not known).
    """

    python: str
    packages: Mapping[str, str]
    needed: Mapping[str, str]
    needed_python: str = ""
    torch: Torch | None = None
    driver: str = ""
    driver_cuda: str = ""


def judge(versions: Versions) -> list[Finding]:
    """Return what the versions mean for a recovery."""
    return [
        _of_package("Python", versions.python, versions.needed_python),
        *(_of_package_or_none(name, versions) for name in PACKAGES),
        *_of_rich(versions),
        *_of_torch(versions),
        *_of_driver(versions),
    ]


def read(driver_cuda: str = "", ask_torch: bool = True) -> Versions:
    """Read the versions of this machine.

    Args:
        driver_cuda: newest version of CUDA that the driver supports.
        ask_torch: whether to import torch in a child process, which takes seconds and tells the versions of
            CUDA and NCCL that it uses.
    """
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    needed, python = _needed()
    return Versions(
        python=platform.python_version(),
        packages=packages,
        needed=needed,
        needed_python=python,
        torch=_torch() if ask_torch and "torch" in packages else None,
        driver=_driver(),
        driver_cuda=driver_cuda,
    )


def has_driver() -> bool:
    """Return whether NVIDIA's kernel module is loaded."""
    return _DRIVER.exists()


def facts(versions: Versions) -> dict[str, str]:
    """Return what should be the same on all nodes of a job, by name."""
    torch = versions.torch or Torch()
    return {
        "Python": versions.python,
        **dict(versions.packages),
        "CUDA of torch": torch.cuda,
        "NCCL": _dotted(torch.nccl),
        "NVIDIA driver": versions.driver,
    }


def _of_package_or_none(name: str, versions: Versions) -> Finding:
    if name in versions.packages:
        return _of_package(name, versions.packages[name], versions.needed.get(name, ""))
    if name in _REQUIRED:
        todo = f"pip install '{name}{versions.needed.get(name, '')}'"
        return Finding(Family.VERSIONS, Severity.ERROR, f"{name} is not installed", "installed packages", todo)
    seen = f"{name} is not installed; only NeMo's jobs need it"
    return Finding(Family.VERSIONS, Severity.OK, seen, "installed packages")


def _of_package(name: str, version: str, needed: str) -> Finding:
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    source = "this interpreter" if name == "Python" else "installed packages"
    try:
        fits = SpecifierSet(needed).contains(Version(version), prereleases=True)
    except InvalidVersion:
        seen = f"{name} {version}, which is no version that can be compared with {needed or 'others'}"
        return Finding(Family.VERSIONS, Severity.ADVICE, seen, source, f"compare it yourself: {needed or 'any'}")
    if fits:
        return Finding(Family.VERSIONS, Severity.OK, f"{name} {version}", source)
    seen = f"{name} {version}; checkpointless needs {needed}"
    todo = "use another interpreter" if name == "Python" else f"pip install '{name}{needed}'"
    return Finding(Family.VERSIONS, Severity.ERROR, seen, source, todo)


def _of_rich(versions: Versions) -> list[Finding]:
    """Judge two versions together: Lightning before 2.5.3 clears a display of rich that later ones do not have."""
    rich, lightning = (versions.packages.get(name, "") for name in ("rich", "lightning"))
    if not rich or not lightning or _numbers(rich) < (14, 1) or _numbers(lightning, 3) >= (2, 5, 3):
        return []
    seen = f"with rich {rich} and lightning {lightning}, a fit with RichProgressBar ends in an IndexError"
    todo = "pip install 'rich<14.1'; or 'lightning>=2.5.3', without NeMo 2.7"
    return [Finding(Family.VERSIONS, Severity.WARNING, seen, "installed packages", todo)]


def _of_torch(versions: Versions) -> list[Finding]:
    torch = versions.torch
    if torch is None:
        return []
    source = "torch, imported in a child process"
    if torch.error:
        todo = f"make `{Path(sys.executable).name} -c 'import torch'` work"
        return [Finding(Family.VERSIONS, Severity.ERROR, torch.error, source, todo)]
    if not torch.nccl:
        build = "this build of torch has no NCCL: ranks meet over gloo"
        if versions.driver:
            todo = "install a torch that is built for CUDA"
            return [Finding(Family.VERSIONS, Severity.WARNING, f"{build}, though there is a GPU", source, todo)]
        return [Finding(Family.VERSIONS, Severity.OK, build, source)]
    problem = problem_of_version(torch.nccl)
    if problem is None:
        return [Finding(Family.VERSIONS, Severity.OK, f"NCCL {_dotted(torch.nccl)}", source)]
    seen, _, todo = problem.partition("; ")
    return [Finding(Family.VERSIONS, Severity.WARNING, seen, source, todo)]


def _of_driver(versions: Versions) -> list[Finding]:
    """Judge the driver: an older one serves a newer CUDA of the same major version only.

    Source: https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
    """
    if not versions.driver:
        return []
    cuda = versions.torch.cuda if versions.torch is not None else ""
    known = f"driver {versions.driver}" + (f" for CUDA {versions.driver_cuda}" if versions.driver_cuda else "")
    if not cuda or not versions.driver_cuda:
        return [Finding(Family.VERSIONS, Severity.OK, known, "NVIDIA's driver")]
    has, wants = _numbers(versions.driver_cuda), _numbers(cuda)
    if has[:1] < wants[:1]:
        seen, todo = f"{known}; torch is built for CUDA {cuda}", "install a newer driver, or a torch for that CUDA"
        return [Finding(Family.VERSIONS, Severity.ERROR, seen, "NVIDIA's driver", todo)]
    if has < wants:
        seen = f"{known}; torch is built for CUDA {cuda}, and new features of it are missing"
        return [Finding(Family.VERSIONS, Severity.ADVICE, seen, "NVIDIA's driver", "install a newer driver")]
    return [Finding(Family.VERSIONS, Severity.OK, f"{known}, torch for CUDA {cuda}", "NVIDIA's driver")]


def _needed() -> tuple[dict[str, str], str]:
    """Return what the installed checkpointless asks of other packages, and of Python, according to its metadata."""
    from packaging.requirements import Requirement

    try:
        own = metadata.metadata(_OWN)
    except metadata.PackageNotFoundError:
        return {}, ""
    wanted = [Requirement(text) for text in own.get_all("Requires-Dist") or ()]
    wanted.sort(key=lambda each: "extra" not in str(each.marker))  # what all need comes last, and counts
    needed = {each.name: str(each.specifier) for each in wanted if each.name in PACKAGES}
    return needed, (own.get_all("Requires-Python") or [""])[0]


def _torch() -> Torch:
    try:
        ended = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TORCH_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return Torch(error=f"torch was not imported within {TORCH_TIMEOUT_S:g} s")
    if ended.returncode != 0:
        last = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
        return Torch(error=f"torch cannot be imported: {last}")
    said = json.loads(ended.stdout.strip().splitlines()[-1])
    return Torch(said["version"], said["cuda"], tuple(said["nccl"]))


def _driver() -> str:
    """Return the version of NVIDIA's kernel module, or "".

    The file's first line is ``NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu ...``.
    """
    try:
        words = _DRIVER.read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return ""
    return next((word for word in words if word.count(".") and word.replace(".", "").isdigit()), "")


def _numbers(version: str, parts: int = 2) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:parts] if part.isdigit())


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
