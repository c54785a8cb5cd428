"""The demo: it trains a small GPT twice, undisturbed and through faults, and compares the runs bit by bit."""

from __future__ import annotations

import shutil
import time
from datetime import datetime, timezone
from pathlib import Path

from rich.console import Console

from checkpointless.faults.ledger import not_fired
from checkpointless.faults.spec import parse_all
from checkpointless.launcher.agent.launch import launch
from checkpointless.launcher.agent.launch_config import LaunchConfig
from checkpointless.observability.report.incidents import summarize
from checkpointless.observability.report.verify import compare
from checkpointless.observability.telemetry.events import read_events
from checkpointless.observability.telemetry.steps import read_steps
from checkpointless.observability.telemetry.wording import plural
from checkpointless.testing.demo import show
from checkpointless.testing.demo.config import DemoConfig
from checkpointless.testing.demo.result import DemoResult

HEARTBEAT_TIMEOUT_S = 20.0  # a step of the demo takes a tenth of a second; its set-up a few seconds

_STOPPED = "stopped by "  # how the last line of a job that was told to end begins


def run_demo(config: DemoConfig) -> int:
    """Train twice, compare the runs, and show everything.

    Args:
        config: configuration of the demo.

    Returns:
        0 if losses and parameters are bit-identical and every fault happened, else 1.

    Raises:
        FaultSpecError: a fault cannot happen in this demo.
    """
    parse_all(list(config.faults), world_size=config.nproc, max_steps=config.steps)
    console = Console(highlight=False)
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    run_dir = config.run_dir or Path("runs") / f"{stamp}-demo"
    show.plan(console, config, run_dir)
    for name, faults in (("undisturbed", ()), ("disturbed", config.faults)):
        directory = run_dir / name
        if directory.exists():
            shutil.rmtree(directory)
        code, last_words = _train(console, config, directory, faults)
        if code != 0 and last_words.startswith(_STOPPED):
            return 1
        if code != 0:
            console.print(f"[red]the {name} run ended with exit code {code}; its logs: {directory / 'logs'}[/red]")
            return 1
    result = judge(config, run_dir)
    show.result(console, config, result, run_dir)
    return 0 if result.passed else 1


def judge(config: DemoConfig, run_dir: Path) -> DemoResult:
    """Compare the two runs in ``run_dir``."""
    undisturbed, disturbed = read_steps(run_dir / "undisturbed"), read_steps(run_dir / "disturbed")
    specs = parse_all(list(config.faults), None, None)
    verdict = compare(undisturbed, disturbed)
    return DemoResult(
        verdict=verdict,
        undisturbed=undisturbed,
        disturbed=disturbed,
        incidents=summarize(read_events(run_dir / "disturbed")),
        not_fired=not_fired(specs, run_dir / "disturbed"),
        complete=verdict.steps == config.steps and len(verdict.ranks) == config.nproc,
    )


def _train(console: Console, config: DemoConfig, directory: Path, faults: tuple[str, ...]) -> tuple[int, str]:
    """Return the exit code of a job, and the last line that it said."""
    said = [""]

    def say(line: str) -> None:
        said.append(line)
        console.print(f"  {line}")

    directory.mkdir(parents=True)
    with_faults = f" through {plural(len(faults), 'fault')}" if faults else ", undisturbed"
    console.print(f"[bold]training {config.nproc} ranks for {config.steps} steps{with_faults}[/bold]")
    began_s = time.monotonic()
    program = config.trainer.program(config.task)
    with console.status("importing the frameworks once (about 10 s), then forking the ranks ..."):
        code = launch(
            LaunchConfig(
                nproc_per_node=config.nproc,
                script=program.module,
                script_args=program.arguments,
                module=True,
                run_dir=directory,
                cpu=True,
                preload=tuple(config.trainer.preload()),
                heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
                faults=faults,
                record_steps=True,
                stream_logs=False,
            ),
            say,
        )
    if code == 0:
        console.print(f"  done in {time.monotonic() - began_s:.1f} s\n")
    return code, said[-1]
