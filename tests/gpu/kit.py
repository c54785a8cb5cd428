"""Collect the wheels that the suite needs beside torch, for a machine without a network: ``make gpu-kit``.

The base install's dependencies and versions come from ``pyproject.toml``. Nothing is resolved, so that torch is
never pulled in; instead each wheel is asked what it requires, and the kit is refused if nobody brings that.

``make gpu-kit WITH=nemo`` collects what NeMo needs into a second folder, which travels by itself.
"""

from __future__ import annotations

import argparse
import email
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.gpu import nccl_library
from tests.wheel.contents import FOLDERS, differing

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "gpu-kit"
NEMO_FOLDER = ROOT / "build" / "gpu-kit-nemo"
NEMO = Path(__file__).parent / "nemo.txt"
MOST_BYTES = 55_000_000
MEGATRON = "megatron-core"
#: Of the development tools, those that the tests import.
TOOLS = ("pytest", "pytest-timeout", "hypothesis")
#: What the wheels above require, without torch, what comes with it, and NumPy, which an image with torch has.
BESIDE = (
    *("iniconfig", "markdown-it-py", "mdurl", "pluggy", "pygments", "pytorch-lightning", "pyyaml"),
    *("sortedcontainers", "tqdm"),
)
WITH_TORCH = {
    *("torch", "filelock", "fsspec", "jinja2", "markupsafe", "networkx", "numpy", "setuptools", "sympy"),
    "typing-extensions",
}
#: Beside these: published as sources only.
NEMO_SOURCES = ("antlr4-python3-runtime==4.9.3", "wget==3.2")
#: The folders and files that our wheel is made of.
SOURCES = (*FOLDERS, "pyproject.toml", "setup.py", "README.md", "LICENSE")
_PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in range(34, 16, -1)), "manylinux2014_x86_64")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class KitError(RuntimeError):
    """The kit cannot be made, or is not what is needed; the message is one line."""


def requirements(pyproject: str) -> list[str]:
    """Return what the kit has, as pip is told."""
    base = [each for each in _list(pyproject, "dependencies") if name_of(each) not in WITH_TORCH]
    megatron = [each for each in _list(pyproject, "nemo") if name_of(each) == MEGATRON]
    tools = [each for each in _list(pyproject, "dev") if name_of(each) in TOOLS]
    return [*base, *megatron, *tools, *BESIDE]


def name_of(requirement: str) -> str:
    """Return the normalised name of a requirement or distribution."""
    found = _NAME.match(requirement.strip())
    if found is None:
        raise KitError(f"{requirement!r} names no distribution")
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def lacking(required: Mapping[str, Iterable[str]]) -> list[str]:
    """Return what wheels require and nobody brings, as ``wheel needs other``."""
    present = {name_of(each) for each in required} | WITH_TORCH
    return [
        f"{wheel} needs {name_of(each)}"
        for wheel, needs in required.items()
        for each in needs
        if name_of(each) not in present and "extra ==" not in each.partition(";")[2] and _counts(each)
    ]


def required_by(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
        return email.message_from_bytes(archive.read(path)).get_all("Requires-Dist") or []


def check_size(sizes: Mapping[str, int]) -> None:
    total = sum(sizes.values())
    if total > MOST_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        raise KitError(
            f"the kit has {total / 1e6:.0f} MB and may have {MOST_BYTES / 1e6:.0f}: "
            f"the largest file is {largest} with {sizes[largest] / 1e6:.0f}"
        )


def fits(wheel: str, python: tuple[int, int]) -> bool:
    """Return whether a wheel is for a version of Python, as its name says."""
    interpreter, abi = wheel.removesuffix(".whl").split("-")[-3:-1]
    return abi in ("none", "abi3") or f"cp{python[0]}{python[1]}" in interpreter.split(".")


def unpack(wheel: Path, site: Path) -> None:
    """Unpack a wheel into ``site`` without its scripts, and without a ``tests`` that hides this one."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            data = re.fullmatch(r"[^/]+\.data/(\w+)/(.*)", name)
            is_script = data is not None and data[1] not in ("purelib", "platlib")
            if name.endswith("/") or name.startswith("tests/") or is_script:
                continue
            target = (site / (data[2] if data is not None else name)).resolve()
            if not target.is_relative_to(site.resolve()):
                raise KitError(f"{wheel.name} has a file outside of its folder: {name}")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(name))


def make(folder: Path, python: str, arch: int) -> list[Path]:
    """Fill ``folder`` with wheels and NCCL's library for ``arch`` (0: without it), and return them."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    wanted = requirements((ROOT / "pyproject.toml").read_text())
    _pip("download", *_for(python), "-d", str(folder), *wanted)
    with tempfile.TemporaryDirectory() as name:  # a build in the working tree would leave files there
        for source in SOURCES:
            path = ROOT / source
            copy = shutil.copytree if path.is_dir() else shutil.copy
            copy(path, Path(name) / source)
        _pip("wheel", "-w", str(folder), name)
    (ours,) = folder.glob("checkpointless-*.whl")
    if other := differing(ours, ROOT):
        raise KitError(f"our wheel is not what this tree has: {other[0]} differs (see tests/wheel/contents.py)")
    wheels = sorted(folder.glob("*.whl"))
    missing = lacking({each.name.partition("-")[0]: required_by(each) for each in wheels})
    if missing:
        raise KitError(f"the kit is not whole: {'; '.join(missing)}: add it to BESIDE in tests/gpu/kit.py")
    if arch:
        print(f"gpu-kit: fetching {nccl_library.WHEEL}, of which little stays; about 250 MB", flush=True)
        with tempfile.TemporaryDirectory() as name:
            _pip("download", *_for(python), "-d", name, nccl_library.WHEEL)
            try:
                nccl_library.collect(next(Path(name).glob("*.whl")), arch, folder)
            except (ValueError, OSError, subprocess.CalledProcessError) as error:
                raise KitError(f"NCCL's library cannot be cut: {error}") from error
    return _sized(folder)


def make_nemo(folder: Path, python: str) -> list[Path]:
    """Fill ``folder`` with the wheels that NeMo needs beside the kit, and return them."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _pip("download", *_for(python), "-d", str(folder), "-r", str(NEMO))
    _pip("wheel", "-w", str(folder), *NEMO_SOURCES)
    return _sized(folder)


def _sized(folder: Path) -> list[Path]:
    files = sorted(folder.iterdir())
    check_size({each.name: each.stat().st_size for each in files})
    return files


def _for(python: str) -> list[str]:
    """Return what makes pip choose wheels for that Python."""
    platforms = [word for platform in _PLATFORMS for word in ("--platform", platform)]
    return ["--python-version", python, "--implementation", "cp", "--only-binary=:all:", *platforms]


def _list(pyproject: str, name: str) -> list[str]:
    """Return a list of strings of ``pyproject.toml``; Python 3.10 has no parser of its own."""
    found = re.search(rf"^{name} = \[\n(.*?)^\]", pyproject, re.M | re.S)
    if found is None:
        raise KitError(f"pyproject.toml has no list {name!r}")
    return re.findall(r'^\s*"([^"]+)"', found[1], re.M)


def _counts(requirement: str) -> bool:
    """Return whether a requirement holds on Linux with a recent Python, as far as its marker says so simply."""
    marker = requirement.partition(";")[2]
    return not re.search(r"python_version\s*<|sys_platform == .(win32|darwin)|platform_system == .Windows", marker)


def _pip(what: str, *words: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", what, "--no-deps", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines() or [""]
        raise KitError(f"pip failed: {errors[-1].strip()}")


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--python", default="3.12", help="of the machine with the GPU (default: 3.12)")
    options.add_argument("--arch", type=int, default=90, help="90 for H100 and H200; 0: no NCCL (default: 90)")
    options.add_argument(
        "--with", dest="extra", choices=("", "nemo"), default="", metavar="nemo", help="nemo: a second kit, too"
    )
    chosen = options.parse_args(arguments)
    try:
        kits = {FOLDER: make(FOLDER, chosen.python, chosen.arch)}
        if chosen.extra:
            kits[NEMO_FOLDER] = make_nemo(NEMO_FOLDER, chosen.python)
    except KitError as error:
        print(f"gpu-kit: {error}", file=sys.stderr)
        return 1
    for folder, files in kits.items():
        total = sum(each.stat().st_size for each in files)
        print(f"gpu-kit: {len(files)} files, {total / 1e6:.1f} MB, in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
