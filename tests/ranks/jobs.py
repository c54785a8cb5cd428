"""Whole jobs under the agent, with the ranks' zygote forked from a process that has imported NeMo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpointless.telemetry.events import read_events
from checkpointless.telemetry.incidents import IncidentSummary, summarize
from checkpointless.telemetry.steps import read_steps
from checkpointless.telemetry.verify import Steps
from tests.ranks.nemo_zygote import Zygote

RUNNER = "checkpointless.recipes.runner"


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
    (answer,) = zygote.run(1, "tests.ranks.jobs:launch_here", {"settings": arguments}, limit_s=limit_s)
    return Job(answer["code"], tuple(answer["said"]), run_dir)


def launch_here(settings: dict[str, Any]) -> dict[str, Any]:
    """In the forked process: be the agent."""
    from checkpointless.agent.launch import LaunchConfig, launch

    said: list[str] = []
    settings = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    settings["run_dir"] = Path(settings["run_dir"])
    code = launch(
        LaunchConfig(**settings, preload=(), cpu=True, fork_here=True, stream_logs=False),
        said.append,
    )
    return {"code": code, "said": said}
