"""Whole jobs under the agent, with the ranks' zygote forked from a process that has imported NeMo."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpointless.agent.handshake import TOKEN_ENV
from checkpointless.telemetry.events import read_events
from checkpointless.telemetry.incidents import IncidentSummary, summarize
from checkpointless.telemetry.steps import read_steps
from checkpointless.telemetry.verify import Steps
from tests.ranks.nemo_zygote import Zygote

RUNNER = "checkpointless.recipes.runner"
TOKEN = "a secret of the tests that is long enough"


@dataclass(frozen=True)
class Job:
    """How a job ended.

    Attributes:
        code: its exit code.
        said: the agent's lines for the terminal.
        run_dir: where it wrote.
    """

    code: int
    said: tuple[str, ...]
    run_dir: Path
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def steps(self) -> Steps:
        return read_steps(self.run_dir)

    @property
    def incidents(self) -> list[IncidentSummary]:
        return summarize(read_events(self.run_dir))

    def log(self, rank: int) -> str:
        return (self.run_dir / "logs" / f"rank-{rank}.log").read_text(errors="replace")

    def story(self) -> str:
        """What to show when a test fails."""
        logs = "\n".join(
            f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-25:])
            for path in sorted((self.run_dir / "logs").iterdir())
        )
        return "\n".join([f"exit code {self.code}", *self.said, logs])


Disturb = Callable[..., Job]  # the fixture that runs a job with faults and compares it with one without


def run_job(
    zygote: Zygote,
    run_dir: Path,
    nproc: int,
    *,
    script: str = RUNNER,
    args: tuple[str, ...] = (),
    faults: tuple[str, ...] = (),
    limit_s: float = 90.0,
    **settings: Any,
) -> Job:
    """Run a job to its end.

    Args:
        zygote: the process to fork from.
        run_dir: a fresh directory.
        nproc: number of ranks.
        script: a script, or the recipe runner.
        args: its arguments; for the runner the recipe's overrides.
        faults: specs.
        limit_s: the test fails if it takes longer.
        **settings: further fields of ``LaunchConfig``.
    """
    settings = {"limit_s": limit_s, **settings}
    (job,) = run_nodes(zygote, run_dir, 1, nproc, script=script, args=args, faults=faults, **settings)
    assert job is not None
    return job


def run_nodes(
    zygote: Zygote,
    run_dir: Path,
    nnodes: int,
    nproc: int,
    *,
    script: str = RUNNER,
    args: tuple[str, ...] = (),
    faults: tuple[str, ...] = (),
    limit_s: float = 90.0,
    spares: int = 0,
    late: float | None = None,
    lost: tuple[int, ...] = (),
    outside: bool = False,
    **settings: Any,
) -> list[Job | None]:
    """Run a job of several nodes to its end, each under an agent of its own, on this machine.

    Args:
        nnodes: how many train.
        nproc: ranks of each.
        spares: agents that wait to take the place of a lost one.
        late: start one more agent so many seconds after the others, as the last node once more.
        lost: the nodes that will be killed.
        outside: whether the coordinator has a process of its own.

    Returns:
        What each agent says, by node; None for one that was killed.
    """
    agents = nnodes + spares + (late is not None)
    arguments = {
        "nproc_per_node": nproc,
        "script": script,
        "module": script == RUNNER,
        "script_args": ["tiny_gpt_cpu", *args] if script == RUNNER else list(args),
        "run_dir": str(run_dir),
        "faults": list(faults),
        "record_steps": True,
        "heartbeat_timeout_s": 20.0,
        **settings,
    }
    if agents > 1:
        arguments |= {"nnodes": nnodes, "spares": spares, "token": TOKEN, "rdzv_endpoint": f"127.0.0.1:{_port()}"}
    with _coordinator(arguments) if outside else nullcontext():
        answers = zygote.run(
            agents,
            "tests.ranks.jobs:launch_here",
            {"settings": arguments, "late": late},
            limit_s=limit_s,
            expendable=lost,
        )
    return [Job(each["code"], tuple(each["said"]), run_dir) if each is not None else None for each in answers]


@contextmanager
def _coordinator(settings: dict[str, Any]) -> Iterator[None]:
    """A coordinator in a process of its own, which must end well."""
    command = [
        "coordinator",
        "--nnodes",
        str(settings["nnodes"]),
        "--nproc-per-node",
        str(settings["nproc_per_node"]),
    ]
    command += ["--rdzv-endpoint", settings["rdzv_endpoint"], "--run-dir", settings["run_dir"]]
    command += ["--node-timeout", str(settings.get("node_timeout_s", 10)), "--heartbeat-timeout", "20"]
    process = subprocess.Popen(
        [sys.executable, "-m", "checkpointless", *command],
        env={**os.environ, TOKEN_ENV: TOKEN},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert any("coordinating" in line for line in process.stderr)
        yield
        _, said = process.communicate(timeout=20)
        assert process.returncode == 0, said
    finally:
        process.kill()
        process.wait()


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch_here(settings: dict[str, Any], late: float | None = None) -> dict[str, Any]:
    """In the forked process: be the agent of the node that this process was given the number of."""
    from checkpointless.agent.launch import LaunchConfig, launch

    node = int(os.environ["RANK"])
    if node == settings.get("nnodes", 1) and late is not None:
        time.sleep(late)
        node -= 1
    settings = {**settings, "node_rank": node}
    said: list[str] = []
    settings = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    settings["run_dir"] = Path(settings["run_dir"])
    code = launch(
        LaunchConfig(**settings, preload=(), cpu=True, fork_here=True, stream_logs=False),
        said.append,
    )
    return {"code": code, "said": said}
