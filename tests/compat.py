"""Run the tests with other Pythons, the newest Lightning and a newer torch, for ``make compat``.

Each environment is made under ``build/compat``, the tests run in it, and it is removed. What cannot be made on this
machine is said in the table at the end; only tests that fail make the exit status 1.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "compat"
TORCH = "torch==2.13.0"
OLDER_TORCH = ("torch==2.11.0", "lightning==2.4.0")
NEWER_TORCH = "torch==2.14.1"
NEWEST_TORCH = "torch==2.15.0"
BIG = "its wheels are builds for CUDA: 2.7 GB to download, and 6 GB of disk while it is tested"
WITHOUT_NEMO = ("tests/ranks/test_block.py", "tests/ranks/test_staged.py")
LOOPS = ("tests/ranks/test_plain_ddp.py", "tests/ranks/test_plain_fsdp2.py")
LIGHTNING_ONLY = ("tests/ranks/test_any_trainer.py", "tests/ranks/test_bare_import.py")
FOR_ANY = (*LOOPS, *LIGHTNING_ONLY, *WITHOUT_NEMO)
#: This prints the versions that were installed in the environment, as JSON.
VERSIONS = """\
import importlib.metadata as installed, json, platform
names = {each.metadata["Name"] for each in installed.distributions()}
print(json.dumps({"Python": platform.python_version()}
    | {name: installed.version(name) for name in ("torch", "lightning", "nemo-toolkit") if name in names}))
"""


@dataclass(frozen=True)
class Environment:
    name: str
    python: str
    requirements: tuple[str, ...]
    further: tuple[str, ...] = ()  # test files beside those of the command line
    note: str = ""
    plain_pip: bool = False  # pip reads no configuration of this machine, which may cap versions


@dataclass(frozen=True)
class Outcome:
    name: str
    versions: str
    result: str
    failed: bool = False


ENVIRONMENTS = (
    Environment("Python 3.10", "3.10", ("-e", ".[dev]", TORCH)),
    Environment("Python 3.12", "3.12", ("-e", ".[dev]", TORCH), FOR_ANY, BIG),
    Environment("newest Lightning", "3.11", ("--upgrade", "-e", ".[dev]", TORCH, "lightning"), LIGHTNING_ONLY),
    Environment(
        "older torch", "3.12", ("-e", ".[dev]", *OLDER_TORCH), (*LOOPS, *LIGHTNING_ONLY), BIG, plain_pip=True
    ),
    Environment("newer torch", "3.11", ("-e", ".[dev]", NEWER_TORCH), (*LIGHTNING_ONLY, *WITHOUT_NEMO), BIG),
    Environment("newest torch", "3.12", ("-e", ".[dev]", NEWEST_TORCH), FOR_ANY, BIG, plain_pip=True),
    Environment("newer Lightning with NeMo", "3.11", ("-e", ".[nemo,dev]", TORCH, "lightning>2.4"), LIGHTNING_ONLY),
)


def interpreter(version: str) -> Path | None:
    """Return an interpreter of a version that starts and can make environments, or None."""
    on_path = shutil.which(f"python{version}")
    pyenv = (Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python{version}")
    for candidate in (*([Path(on_path)] if on_path else []), *sorted(pyenv, reverse=True)):
        if subprocess.run([candidate, "-c", "import ensurepip, venv"], capture_output=True).returncode == 0:
            return candidate
    return None


def logged(what: str, command: Sequence[str | Path], log: Path, plain_pip: bool = False) -> int:
    print(f"compat: {what}", flush=True)
    env = {**os.environ, "PIP_CONFIG_FILE": os.devnull} if plain_pip else None
    with log.open("w") as out:
        return subprocess.run(command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT).returncode


def why_not_installed(log: str) -> str:
    """Say why pip gave up, in one line of at most 160 characters."""
    said = [line.strip().partition(";")[0] for line in log.splitlines() if re.match(r"\s+\S.* depends on ", line)]
    conflicts = [line for line in said if not line.startswith("checkpointless")]
    errors = [line.removeprefix("ERROR: ").strip() for line in log.splitlines() if line.startswith("ERROR: ")]
    return f"not installable: {next(iter([*conflicts, *errors]), 'pip says nothing')}"[:160]


def summary(log: str) -> str:
    counted = [line for line in log.splitlines() if re.search(r"\d+ (passed|failed|errors?|skipped)\b.* in ", line)]
    return counted[-1].strip("= ") if counted else "pytest said no result"


def attempt(environment: Environment, tests: Sequence[str]) -> Outcome:
    name = environment.name
    python = interpreter(environment.python)
    if python is None:
        return Outcome(name, "", f"no Python {environment.python} on this machine")
    if environment.note:
        print(f"compat: {name}: {environment.note}", flush=True)
    logs = FOLDER / name.lower().replace(" ", "-")
    home = logs / "venv"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    try:
        log = logs / "install.log"
        steps: dict[str, list[str | Path]] = {
            "making an environment": [python, "-m", "venv", home],
            "installing, which takes minutes": [home / "bin" / "pip", "install", *environment.requirements],
        }
        for what, step in steps.items():
            if logged(f"{name}: {what}", step, log, environment.plain_pip) != 0:
                return Outcome(name, f"Python {environment.python}", why_not_installed(log.read_text()))
        said = subprocess.run([home / "bin" / "python", "-c", VERSIONS], capture_output=True, text=True, check=True)
        versions = ", ".join(f"{key} {value}" for key, value in json.loads(said.stdout).items())
        runs = [tests, *([("-m", "not nemo and not long", *environment.further)] if environment.further else [])]
        results, failed = [], False
        for number, arguments in enumerate(runs):
            log = logs / f"tests-{number}.log"
            command: list[str | Path] = [home / "bin" / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
            command += arguments
            status = logged(f"{name}: testing with {versions}", command, log)
            failed = failed or status != 0
            results.append(summary(log.read_text()) + (f" ({log.relative_to(ROOT)})" if status else ""))
        return Outcome(name, versions, "; ".join(results), failed)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def table(outcomes: Sequence[Outcome]) -> str:
    rows = [(each.name, each.versions, each.result) for each in outcomes]
    lines = [("environment", "installed", "result"), ("---",) * 3, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: Sequence[str]) -> int:
    only, tests = "", list(arguments)
    if tests[:1] == ["--only"]:
        only, tests = tests[1], tests[2:]
    outcomes = [attempt(each, tests) for each in ENVIRONMENTS if only in ("", each.name)]
    print(table(outcomes))
    return int(any(each.failed for each in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
