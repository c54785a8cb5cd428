"""Output of the demo: the plan, the incidents, both loss curves, the verdict, and a picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from checkpointless.observability.report.incidents import IncidentSummary
from checkpointless.observability.report.verify import Steps
from checkpointless.observability.telemetry.steps import NO_LOSS
from checkpointless.testing.demo.config import DemoConfig
from checkpointless.testing.demo.result import DemoResult

_MAX_ROWS = 24


def plan(console: Console, config: DemoConfig, run_dir: Path) -> None:
    """Show what the demo is going to do."""
    layout = ", ".join(f"{key}={size}" for key, size in config.layout.items()) or "data parallel"
    console.print(
        f"{config.trainer.what} on {config.trainer.corpus}, {config.nproc} CPU ranks ({layout}), "
        f"dropout {config.dropout:g}."
    )
    for note in config.trainer.notes(config.task):
        console.print(f"  {note}")
    for fault in config.faults:
        console.print(f"  fault to inject: [bold]{fault}[/bold]")
    console.print(f"  run dir: {run_dir}\n")


def result(console: Console, config: DemoConfig, outcome: DemoResult, run_dir: Path) -> None:
    """Show the incidents, the losses and the verdict, and draw both curves."""
    if outcome.incidents:
        console.print(incidents_table(outcome.incidents))
    console.print(losses_table(outcome.undisturbed, outcome.disturbed))
    picture = run_dir / "losses.png"
    if importlib.util.find_spec("matplotlib") is not None:
        draw(outcome.undisturbed, outcome.disturbed, outcome.incidents, picture)
        console.print(f"picture of both curves: {picture}")
    else:
        console.print("no picture of the curves: it needs matplotlib (pip install matplotlib)")
    for fault in outcome.not_fired:
        console.print(f"[red]the fault {fault} never happened[/red]")
    if not outcome.complete:
        console.print(f"[red]not every one of the {config.steps} steps was recorded on every rank[/red]")
    colour = "green" if outcome.passed else "red"
    console.print(f"[{colour} bold]{outcome.verdict.sentence}[/{colour} bold]")


def incidents_table(incidents: Sequence[IncidentSummary]) -> Table:
    """Return a table of all incidents and how long their stages took, in seconds."""
    stages = [stage for stage in _stage_order(incidents) if any(stage in each.stages_s for each in incidents)]
    table = Table(title="incidents: seconds per stage (the slowest rank's)", title_justify="left")
    table.add_column("incident")
    for incident in incidents:
        table.add_column(incident.incident, justify="right")
    rows: list[tuple[str, list[str]]] = [
        ("what", [each.cause for each in incidents]),
        ("resumed after step", ["-" if each.target is None else str(each.target) for each in incidents]),
        ("rung", [each.rung.label for each in incidents]),
        ("new processes", [", ".join(f"rank {rank}" for rank in each.respawned) or "none" for each in incidents]),
        ("bytes moved", [f"{each.nbytes:,}" for each in incidents]),
        ("memory peak", [_growth(each.peak_growth_bytes) for each in incidents]),
    ]
    rows += [(stage, [_seconds(each.stages_s.get(stage)) for each in incidents]) for stage in stages]
    rows += [
        ("fault to next step", [_seconds(each.headline_s) for each in incidents]),
        ("outcome", [each.outcome.value for each in incidents]),
    ]
    for name, cells in rows:
        table.add_row(name, *cells)
    return table


def _growth(extra_bytes: int | None) -> str:
    """Format how much more memory was used than before the fault, in MiB."""
    return "-" if extra_bytes is None else f"+{extra_bytes / 2**20:.1f} MiB"


def losses_table(undisturbed: Steps, disturbed: Steps) -> Table:
    """Return a table of both loss curves, each from the first rank that reports one."""
    table = Table(title="losses", title_justify="left")
    for column in ("step", "undisturbed", "with faults", "same bits"):
        table.add_column(column, justify="right")
    left, right = curve(undisturbed), curve(disturbed)
    steps = sorted({*left, *right})
    shown = steps if len(steps) <= _MAX_ROWS else [*steps[: _MAX_ROWS // 2], *steps[-_MAX_ROWS // 2 :]]
    for step in shown:
        a, b = left.get(step), right.get(step)
        same = "[green]yes[/green]" if a == b else "[red]no[/red]"
        table.add_row(str(step), _loss(a), _loss(b), same)
    if shown != steps:
        table.caption = f"{len(steps) - len(shown)} steps in between are not shown"
    return table


def curve(steps: Steps) -> dict[int, float]:
    """Return the losses by step of the first rank with any but zeros (pipeline stages in between report none)."""
    for rank in sorted(steps):
        known = [record for record in steps[rank] if record.loss != NO_LOSS]
        losses = {record.step: float.fromhex(record.loss) for record in known}
        if any(losses.values()):
            return losses
    return {}


def draw(undisturbed: Steps, disturbed: Steps, incidents: Sequence[IncidentSummary], path: Path) -> None:
    """Draw both curves over each other, with a mark at each incident."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    left, right = curve(undisturbed), curve(disturbed)
    axes.plot(list(left), list(left.values()), linewidth=6, alpha=0.35, label="undisturbed")
    axes.plot(list(right), list(right.values()), linewidth=1.5, color="black", label="with faults")
    for number, incident in enumerate(incidents):
        if incident.target is not None:
            label = "incident" if number == 0 else None
            axes.axvline(incident.target + 0.5, color="red", linestyle=":", linewidth=1, label=label)
    axes.set(xlabel="optimizer step", ylabel="loss", title="Losses with and without faults")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _stage_order(incidents: Sequence[IncidentSummary]) -> list[str]:
    order: list[str] = []
    for incident in incidents:
        order += [stage for stage in incident.stages_s if stage not in order]
    return order


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.6f}"
