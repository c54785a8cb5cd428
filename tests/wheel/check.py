"""Build sdist and wheel, and use them as one does who has nothing else: ``make dist-check``.

The wheel is installed without extras into an environment of its own, and all its commands run in an empty folder.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from build import ProjectBuilder
from build.env import DefaultIsolatedEnv
from pyproject_hooks import quiet_subprocess_runner

from checkpointless.system.environment import TOKEN_ENV
from tests.ports import free_port
from tests.wheel.contents import differing

ROOT = Path(__file__).parents[2]
#: A build without this folder has to be noticed.
LEFT_OUT = "checkpointless/state/rank_local"
#: The examples that need no extra, and their ranks.
EXAMPLES = {"train_ddp": 2, "train_hsdp": 4, "train_lightning": 4}
FAULTS = ("exception@before_optimizer:rank=1,step=2", "sigkill@optimizer:rank=0,step=4")
STEPS = 6
COMMAND_S, INSTALL_S = 600.0, 1800.0
_SEEN_CHARS = 6000
_PIPED: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


class CheckError(RuntimeError):
    """A check has failed; the message says which, and what was seen."""


def copy_of_tree(target: Path) -> Path:
    """Copy what git knows of this tree, and what it does not ignore, to ``target``, and return it."""
    listed = run(["git", "ls-files", "-co", "--exclude-standard", "-z"], ROOT, os.environ)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    return target


def run(command: Sequence[str], folder: Path, env: Mapping[str, str], limit_s: float = COMMAND_S) -> str:
    try:
        done = subprocess.run(command, cwd=folder, env=env, timeout=limit_s, check=False, **_PIPED)
    except subprocess.TimeoutExpired as error:
        raise CheckError(f"{' '.join(command)}: not through after {limit_s:g} s") from error
    if done.returncode != 0:
        seen = done.stdout[-_SEEN_CHARS:]
        raise CheckError(f"{' '.join(command)}: exit status {done.returncode}\n{seen}")
    return done.stdout


class Check:
    """Runs the checks, and says each with the seconds since the beginning."""

    def __init__(self, work: Path, torch: str) -> None:
        self._work = work
        self._torch = torch
        self._began_s = time.monotonic()
        self._bin = work / "env" / "bin"
        self._empty = work / "empty"  # where users' commands run
        self._empty.mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        kept[TOKEN_ENV] = secrets.token_hex(32)  # of jobs on several nodes
        self._env = {**kept, "PATH": f"{self._bin}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

    def all(self) -> None:
        wheel, sdist = self._build()
        self._install(wheel)
        self._imports("the wheel")
        self._commands()
        self._move()
        self._pip("install", "--no-compile", "--no-deps", "--force-reinstall", str(sdist))
        self._imports("the sdist")
        self._say("all is well")

    def _say(self, what: str) -> None:
        print(f"dist-check: {time.monotonic() - self._began_s:4.0f} s: {what}", flush=True)

    def _build(self) -> tuple[Path, Path]:
        tree, dist = copy_of_tree(self._work / "tree"), self._work / "dist"
        with DefaultIsolatedEnv() as env:
            env.install(ProjectBuilder(tree).build_system_requires)

            def built(kind: Literal["sdist", "wheel"], source: Path, target: Path) -> Path:
                self._say(f"building the {kind} of {source.name}")
                builder = ProjectBuilder.from_isolated_env(env, source, runner=quiet_subprocess_runner)
                return Path(builder.build(kind, target))

            sdist = built("sdist", tree, dist)
            with tarfile.open(sdist) as archive:
                archive.extractall(self._work, filter="data")
            wheel = built("wheel", self._work / sdist.name.removesuffix(".tar.gz"), dist)
            if other := differing(wheel, tree):
                raise CheckError(f"the wheel differs from the tree in {len(other)} files: {', '.join(other)}")
            shutil.rmtree(tree / LEFT_OUT)
            less = built("wheel", tree, self._work / "less")
        self._say(f"comparing the wheel without {LEFT_OUT} with the whole tree, which must not be taken for it")
        lacking = {path.relative_to(ROOT).as_posix() for path in (ROOT / LEFT_OUT).glob("*.py")}
        if not lacking or not lacking <= set(differing(less, ROOT)):
            raise CheckError(f"the wheel without {LEFT_OUT} was taken for whole")
        return wheel, sdist

    def _install(self, wheel: Path) -> None:
        self._say(f"installing the wheel and {self._torch}, without extras")
        venv.create(self._bin.parent, with_pip=True)
        self._pip("install", "--no-compile", self._torch, str(wheel))
        self._pip("check")

    def _pip(self, *words: str) -> None:
        pip = [str(self._bin / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        run([*pip, *words], self._empty, self._env, INSTALL_S)

    def _imports(self, what: str) -> None:
        script = self._work / "imports.py"
        shutil.copy(Path(__file__).with_name("imports.py"), script)
        self._say(f"importing every module of {what}")
        said = run([str(self._bin / "python"), str(script)], self._empty, self._env).strip()
        if f"from {self._bin.parent}{os.sep}" not in said:
            raise CheckError(f"the modules do not come from the environment: {said}")
        self._say(said)

    def _command(self, words: Sequence[str], expected: str) -> None:
        said = run([str(self._bin / "checkpointless"), *words], self._empty, self._env)
        if expected not in said:
            raise CheckError(f"checkpointless {' '.join(words)} does not say {expected!r}:\n{said[-_SEEN_CHARS:]}")
        self._say(f"well: checkpointless {' '.join(words)}")

    def _commands(self) -> None:
        demo, small = ["demo", "--nproc", "2", "--steps", "4"], "equal: 4 steps on 2 ranks"
        self._command(["--version"], "checkpointless ")
        jobs = [
            (["doctor"], "torch"),
            ([*demo, "--run-dir", "demo"], "what trains is --trainer ddp"),
            ([*demo, "--trainer", "ddp", "--run-dir", "demo-ddp"], small),
        ]
        faults = [word for fault in FAULTS for word in ("--fault", fault)]
        for name, ranks in EXAMPLES.items():
            shutil.copy(ROOT / "examples" / f"{name}.py", self._empty)
            for kind, more in (("calm", []), ("rough", faults)):
                options = ["--cpu", "--nproc-per-node", str(ranks), "--record-steps", *more]
                options += ["--run-dir", f"{name}-{kind}", f"{name}.py", "--steps", str(STEPS)]
                jobs.append((["run", *options], ""))
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(self._command, words, expected) for words, expected in jobs]:
                done.result()
        for name, ranks in EXAMPLES.items():
            self._command(["verify", f"{name}-calm", f"{name}-rough"], f"equal: {STEPS} steps on {ranks} ranks")
            self._command(["report", f"{name}-rough", "--html", f"{name}.html"], "")
            if not (self._empty / f"{name}.html").read_text().rstrip().endswith("</html>"):
                raise CheckError(f"the report of {name} is no whole page")

    def _move(self) -> None:
        """Move a node of a job on two agents and a spare; its ranks wait in step 3 until they are to pause."""
        shutil.copy(ROOT / "tests" / "ranks" / "agent_scripts" / "once.py", self._empty)
        options, train = ["--cpu", "--record-steps", "--run-dir"], ["once.py", str(STEPS), "fsdp"]
        self._command(["run", "--nproc-per-node", "4", *options, "stays", *train], "")
        where = ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
        nodes = ["run", *where, "--nnodes", "2", "--spares", "1", "--nproc-per-node", "2", *options, "moves"]
        with ThreadPoolExecutor(3) as pool:
            starts = [[*nodes, "--node-rank", str(node), *train, "waits"] for node in range(3)]
            agents = [pool.submit(self._command, words, "") for words in starts]
            while not any(agent.done() for agent in agents):
                try:
                    self._command(["move", "--node", "1", *where], "has moved to a spare")
                    break
                except CheckError as error:
                    self._say(f"once more: {str(error).splitlines()[-1]}")
            for agent in agents:
                agent.result()
        self._command(["verify", "stays", "moves"], f"equal: {STEPS} steps on 4 ranks")
        self._command(["report", "moves"], "moves to a spare")


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--torch", default="torch", help="as pip is told (default: any)")
    chosen = options.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="dist-check-") as name:
        try:
            Check(Path(name).resolve(), chosen.torch).all()
        except CheckError as error:
            print(f"dist-check: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
