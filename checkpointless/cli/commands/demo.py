"""The command ``demo``: a small GPT is trained undisturbed and through faults, and the two runs are compared."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpointless.cli.command import RUNS_DIR, Command, UsageError, count, new_run_dir, positive, say
from checkpointless.cli.job import add_fault_option, fault_specs

if TYPE_CHECKING:
    from checkpointless.testing.demo.trainers import Task, Trainer

#: Names of the demo's trainers, which cost an import; a test compares the two.
TRAINER_NAMES = ("nemo", "ddp", "hsdp", "megatron", "lightning-ddp", "lightning-hsdp")
_DEFAULT, _WITHOUT_NEMO = "nemo", "ddp"
_CHAOS_STEPS, _CHAOS_RANKS = 6, 8
_EPILOG = """\
examples:
  checkpointless demo
  checkpointless demo --nproc 4 --layout tp=2 --dropout 0.1 --fault sigkill@optimizer:rank=1,step=5
  checkpointless demo --trainer hsdp --nproc 8 --layout tp=2
  checkpointless demo --nproc 8 --layout tp=2,pp=2 --steps 6 --fault hang@backward:rank=3,step=4

Without --fault there are two: an exception in a backward pass and a SIGKILL inside an optimizer step.
Exit status: 0 if every fault happened and both runs are equal to the bit, 1 if not.
"""


def _add_demo_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    trainers = f"trainer: {', '.join(TRAINER_NAMES)} (default: nemo; ddp where NeMo is not installed)"
    add("--trainer", choices=TRAINER_NAMES, metavar="NAME", help=trainers)
    ranks = "CPU ranks, up to 32 (default: 4; with --chaos: up to 8)"
    add("--nproc", "--nproc-per-node", type=positive, metavar="N", help=ranks)
    add("--steps", type=positive, metavar="N", help="steps of each run (default: 10; with --chaos: 6)")
    layout = "sizes of tp, pp, ep and cp, as the trainer has them (default: 1)"
    add("--layout", default="", metavar="tp=N,...", help=layout)
    add("--dropout", type=float, default=0.0, metavar="P", help="dropout, in [0, 1) (default: 0)")
    add_fault_option(parser)
    add("--run-dir", type=Path, metavar="D", help="directory of both runs (default: under runs/)")
    add("--chaos", type=positive, metavar="N", help="run N small jobs with drawn layouts and faults instead")
    add("--seed", type=count, metavar="K", help="seed of the draws (default: 0)")
    add("--overlap", action="store_true", help="give half of the jobs a second fault")
    add("--chaos-case", type=count, metavar="I", help="run only case I of the N")


def _demo(options: argparse.Namespace) -> int:
    for name in ("seed", "overlap", "chaos_case"):
        if options.chaos is None and getattr(options, name) not in (None, False):
            raise UsageError(f"--{name.replace('_', '-')} needs --chaos")
    from checkpointless.launcher.agent.ranks.preload import PlatformError

    try:
        return _twice(options) if options.chaos is None else _chaos(options)
    except PlatformError as error:
        raise UsageError(str(error)) from error


def _twice(options: argparse.Namespace) -> int:
    from checkpointless.testing.demo.trainers import DemoError, Task

    nproc, steps = options.nproc or 4, options.steps or 10
    middle, late = max(1, steps * 4 // 10), max(1, steps * 7 // 10)
    faults = options.faults or [
        f"exception@backward:rank={nproc // 2},step={middle}",
        f"sigkill@optimizer:rank={min(1, nproc - 1)},step={late}",
    ]
    trainer = _demo_trainer(options)
    try:
        task = Task(nproc, steps, trainer.layout(options.layout), options.dropout)
        trainer.check(task)
    except DemoError as error:
        raise UsageError(str(error)) from error
    fault_specs(faults, nproc, steps, cpu=True)
    return _run_demo(trainer, task, faults, new_run_dir(options.run_dir, "demo"))


def _run_demo(trainer: Trainer, task: Task, faults: Sequence[str], run_dir: Path) -> int:
    """Train twice, compare and show all; return 0 if the runs are equal and every fault happened, else 1."""
    from checkpointless.cli.tables import console, loss_table, show_job, verdict_table
    from checkpointless.observability.report.summary import Job as Runs
    from checkpointless.observability.report.summary import build_report
    from checkpointless.observability.telemetry.steps import read_steps
    from checkpointless.testing.demo.trainers import GLOBAL_BATCH
    from checkpointless.testing.jobs import Job, run_jobs

    page = console()
    layout = ", ".join(f"{key}={size}" for key, size in task.layout.items()) or "data parallel"
    page.print(f"{trainer.what}: {task.nproc} CPU ranks ({layout}), dropout {task.dropout:g}, in {run_dir}")
    if trainer.name == _DEFAULT and (samples := task.global_batch) != GLOBAL_BATCH:
        page.print(f"a step takes {samples} samples, not the recipe's {GLOBAL_BATCH}: whole microbatches for all")
    ended = []
    for name, specs in (("undisturbed", ()), ("disturbed", tuple(faults))):
        directory = run_dir / name
        say(f"the {name} run: {' '.join(specs) or 'no faults'} (imports the frameworks once, about 10 s)")
        ended += run_jobs([Job(name, [trainer.config(task, directory, specs)], math.inf)], tell=say)
        if not ended[-1].is_good:
            say(f"the {name} run ended with exit code {ended[-1].code}; its logs: {directory / 'logs'}")
            return 1
    calm, rough = ended
    a, b = (read_steps(each.run_dir) for each in ended)
    verdict = rough.compare(a, b)
    show_job(Runs.of([build_report(str(rough.run_dir), rough.events)]), page)
    page.print(verdict_table(verdict, a, b, (calm.name, rough.name)))
    page.print(loss_table(a, b))
    for fault in rough.missing:
        page.print(f"the fault {fault} never happened")
    is_complete = verdict.steps == task.steps and len(verdict.ranks) == task.nproc
    if not is_complete:
        page.print(f"not every one of the {task.steps} steps was recorded on every rank")
    page.print(verdict.sentence)
    return 0 if verdict.equal and is_complete and not rough.missing else 1


def _demo_trainer(options: argparse.Namespace) -> Trainer:
    """Return the trainer that ``options`` ask for; where they ask for none, NeMo's, or DDP's without NeMo."""
    from checkpointless.testing.demo.trainers import TRAINERS, DemoError

    trainer = TRAINERS[options.trainer or _DEFAULT]
    try:
        trainer.require()
    except DemoError as error:
        if options.trainer is not None:
            raise UsageError(str(error)) from error
        say(f"{error}; what trains is --trainer {_WITHOUT_NEMO}")
        return TRAINERS[_WITHOUT_NEMO]
    return trainer


def _chaos(options: argparse.Namespace) -> int:
    asked: dict[str, Any] = {"--layout": options.layout, "--dropout": options.dropout, "--fault": options.faults}
    fixed = [name for name, value in asked.items() if value]
    if fixed:
        raise UsageError(f"--chaos draws layouts and faults itself: leave {', '.join(fixed)} out")
    if options.chaos_case is not None and options.chaos_case >= options.chaos:
        raise UsageError(f"--chaos-case must be below {options.chaos}, not {options.chaos_case}")
    from checkpointless.cli.tables import console
    from checkpointless.testing.chaos import ChaosConfig

    config = ChaosConfig(
        cases=options.chaos,
        seed=options.seed or 0,
        overlap=options.overlap,
        only=options.chaos_case,
        steps=options.steps or _CHAOS_STEPS,
        most_ranks=options.nproc or _CHAOS_RANKS,
        run_dir=options.run_dir or RUNS_DIR,
        trainer=_demo_trainer(options),
    )
    try:
        config.drawn()  # what cannot be drawn is refused before a directory is made
    except ValueError as error:
        raise UsageError(str(error)) from error
    return replace(config, run_dir=new_run_dir(options.run_dir, "chaos")).run(console())


COMMAND = Command(
    "demo", "train a small GPT with and without faults and compare the two", _add_demo_options, _demo, _EPILOG
)
