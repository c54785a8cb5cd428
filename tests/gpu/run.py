"""Run the suite on this machine, part by part, each within its time: ``make gpu``.

Only the standard library is needed here. The wheels of ``make gpu-kit`` are installed, without a network, into a
folder that comes first on the path, so that the environment that has torch stays as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.gpu import kit, nccl_library, results
from tests.wheel.contents import differing

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "build" / "gpu"
SITE = ROOT / "build" / "gpu-site"
ON_CPU = "CHECKPOINTLESS_GPU_ON_CPU"  # in the environment of tests that run over gloo then
MARKER = "CHECKPOINTLESS_GPU_RUN"  # in the environment of everything that a part starts
LIMIT_S = 660.0
_LOOK_S = 90.0
_END_S = 10.0


@dataclass(frozen=True)
class Part:
    """Represents a part of the suite."""

    name: str
    what: str
    limit_s: float
    test_s: float = 120.0
    paths: tuple[str, ...] = ()  # its tests; none for the figures
    on_cpu: tuple[str, ...] = ()  # in place of ``paths`` where there is no CUDA
    by_name: bool = False  # it runs only if it is named


def _tests(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/gpu/test_{name}.py" for name in names)


PARTS = (
    Part(
        "part2",
        "whole jobs of four ranks over NCCL on one GPU, beside torchrun",
        420.0,
        170.0,
        _tests("jobs"),
        _tests("jobs"),
    ),
    Part("part3", "NCCL itself, with several ranks on one GPU where it can", 110.0, paths=_tests("nccl")),
    Part(
        "part1",
        "one process and a device that stalls",
        70.0,
        paths=_tests("stalled_device", "fault_kinds_gpu", "random_streams", "memory", "aborts"),
    ),
    Part("part4", "figures", 60.0),
    Part("part5", "NeMo's strategy over NCCL", 600.0, 400.0, _tests("nemo"), _tests("nemo"), by_name=True),
)


def chosen(only: str) -> list[Part]:
    names = [name for name in only.split(",") if name]
    unknown = set(names) - {part.name for part in PARTS}
    if unknown:
        known = ", ".join(part.name for part in PARTS)
        raise ValueError(f"there is no {', '.join(sorted(unknown))}: the parts are {known}")
    return [part for part in PARTS if (part.name in names if names else not part.by_name)]


def command(part: Part, folder: Path, has_cuda: bool) -> list[str]:
    """Return the command that runs a part; nothing if there is nothing to run without CUDA."""
    if not part.paths:
        measured = [sys.executable, "-m", "benchmarks.gpu.run"]
        return [*measured, "--results", str(folder), "--limit-s", str(part.limit_s)]
    paths = part.paths if has_cuda or not part.on_cpu else part.on_cpu
    options = ["-q", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "tests.gpu.recording"]
    options += ["--import-mode=append", f"--timeout={part.test_s:g}", "--gpu-results", str(folder)]
    options += ["--gpu-part", part.name]
    return [sys.executable, "-u", "-m", "pytest", *paths, *options]


def install(folder: Path, site: Path) -> Path | None:
    """Install a kit's wheels into ``site``, without a network, and return NCCL's library if it has one."""
    ours = sorted(folder.glob("checkpointless-*.whl"))
    if not ours:
        raise kit.KitError(f"{folder} has no wheel of checkpointless: run `make gpu-kit` where there is a network")
    other = differing(ours[0], ROOT)
    if other:
        raise kit.KitError(f"the kit is of other sources ({other[0]} differs): run `make gpu-kit` again")
    wheels = sorted(folder.glob("*.whl"))
    others = [each.name for each in wheels if not kit.fits(each.name, sys.version_info[:2])]
    if others:
        raise kit.KitError(f"the kit is for another Python ({others[0]}): run `make gpu-kit GPU_VERSION=X.Y` again")
    shutil.rmtree(site, ignore_errors=True)
    theirs = sorted(kit.NEMO_FOLDER.glob("*.whl"))  # NeMo wants an older Lightning
    for wheel in {kit.name_of(each.name.partition("-")[0]): each for each in [*wheels, *theirs]}.values():
        kit.unpack(wheel, site)
    return nccl_library.unpack(folder, site)


def environment(site: Path | None) -> dict[str, str]:
    """Return the environment of everything that is started: the kit first, then this tree."""
    path = (site, ROOT, os.environ.get("PYTHONPATH"))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(each) for each in path if each),
        "PYTHONSAFEPATH": "1",  # else this tree's checkpointless, which lacks callbacks/, would come first
        "PYTHONWARNINGS": "ignore",
    }


def run_part(words: Sequence[str], env: Mapping[str, str], log: Path, limit_s: float) -> int | None:
    """Run a part to its end, end all that it has started, and return its status; None if the time was over."""
    mark = uuid.uuid4().hex
    with log.open("wb") as out:
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env={**env, MARKER: mark},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            for pid in [*_marked(mark)]:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            process.wait(_END_S)


def _marked(mark: str) -> Iterator[int]:
    """Yield the processes that a part has started, also those in sessions of their own."""
    wanted = f"{MARKER}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes().split(b"\0"):
                yield int(path.parent.name)
        except OSError:  # it has ended, or is another user's
            continue


def look(folder: Path, env: Mapping[str, str]) -> bool:
    """Write down what machine this is, and return whether it has CUDA."""
    path = folder / results.MACHINE
    words = [sys.executable, "-m", "tests.gpu.machine", str(path)]
    try:
        done = subprocess.run(
            words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=_LOOK_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise kit.KitError(f"torch did not say within {_LOOK_S:.0f} s whether there is a GPU") from error
    if done.returncode != 0:
        raise kit.KitError(f"torch cannot be asked: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return json.loads(path.read_text())["GPU"] != "none"


def run(parts: Sequence[Part], folder: Path, env: Mapping[str, str], has_cuda: bool, limit_s: float) -> None:
    """Run parts one after the other, within ``limit_s`` seconds, and write down those that were cut off."""
    ends_s = time.monotonic() + limit_s
    for part in parts:
        allowed_s = min(part.limit_s, ends_s - time.monotonic())
        if allowed_s <= 0:
            results.add(folder, _cut(part, "the time of the whole suite was over before it began"))
            continue
        print(f"gpu: {part.name}: {part.what}; at most {allowed_s:.0f} s", flush=True)
        log = folder / f"{part.name}.log"
        before = len(results.read(folder))
        status = run_part(command(part, folder, has_cuda), env, log, allowed_s)
        said = log.read_text(errors="replace")
        if status is None:
            results.add(folder, _cut(part, f"it was cut off after {allowed_s:.0f} s\n{said[-8000:]}"))
        elif status != 0 and not results.has_failed(results.read(folder)[before:]):
            results.add(folder, _cut(part, f"it ended with {status}\n{said[-8000:]}"))
        print(f"gpu: {part.name}: {results.summary(results.read(folder)[before:])}", flush=True)


def _cut(part: Part, why: str) -> results.Result:
    return results.Result(part.name, "(the whole part)", results.Outcome.CUT, 0.0, why)


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument(
        "--only",
        default="",
        metavar="PART,...",
        help=f"{', '.join(part.name for part in PARTS)} (default: all but part5)",
    )
    options.add_argument("--kit", type=Path, default=kit.FOLDER, help="the wheels (default: build/gpu-kit)")
    options.add_argument("--results", type=Path, default=RESULTS, help="where results go (default: build/gpu)")
    options.add_argument("--limit-s", type=float, default=LIMIT_S, help=f"for all (default: {LIMIT_S:g} s)")
    args = options.parse_args(arguments)
    folder = args.results.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for name in (results.LINES, results.TABLE, results.JSON, results.MACHINE):
        (folder / name).unlink(missing_ok=True)
    try:
        parts = chosen(args.only)
        site, nccl = SITE if args.kit.is_dir() else None, None
        if site is not None:
            nccl = install(args.kit.resolve(), site)
        else:
            print("gpu: there is no kit (make gpu-kit): what this Python has installed is used", flush=True)
        env = environment(site)
        has_cuda = look(folder, env)
        if has_cuda and nccl is not None:
            env |= {**nccl_library.SETTINGS, "LD_PRELOAD": str(nccl)}
            look(folder, env)  # again, as the version in force is another one
    except (ValueError, kit.KitError) as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 2
    if not has_cuda:
        env |= {ON_CPU: "1"}
        print("gpu: there is no CUDA here: what runs on a CPU is run, and the rest is skipped", flush=True)
    run(parts, folder, env, has_cuda, args.limit_s)
    found = results.read(folder)
    results.write(folder)
    print(f"gpu: {results.summary(found)}; {folder / results.TABLE}", flush=True)
    return int(results.has_failed(found))


if __name__ == "__main__":
    sys.exit(main())
