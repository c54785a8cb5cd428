"""The command ``doctor``: its options, what it looks at, and the page that it shows."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from checkpointless.cli.command import Command
from checkpointless.cli.output import STDOUT, say, write
from checkpointless.cli.values import UsageError, modules, number, positive

if TYPE_CHECKING:
    from checkpointless.doctor.findings import Finding
    from checkpointless.doctor.memory import State

_EPILOG = """\
examples:
  checkpointless doctor                                  this machine
  checkpointless doctor --nproc-per-node 8 --nnodes 4 --rdzv-endpoint node0:29400
  checkpointless doctor --nproc-per-node 8 --script train.py    may a zygote that imports this fork ranks?
  checkpointless doctor --nproc-per-node 8 --preload nemo.collections.llm
  checkpointless doctor --parameters 8e9 --shards 8 --device-memory 80e9    does a recovery fit?
  checkpointless doctor --recipe llama3_8b_pretrain trainer.num_nodes=2
  checkpointless doctor --run-dir runs/1                 what all nodes of a job found when it began
  checkpointless doctor --json - | jq .worst

Exit status: 0 if all is ok or advice, 1 if there is a warning or an error, 2 if it cannot be looked at as asked.
"""


def add_doctor_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``doctor``."""
    add = parser.add_argument
    add(
        "--nproc-per-node",
        "--nproc_per_node",
        type=positive,
        metavar="N",
        help="ranks (default: 1, or the recipe's)",
    )
    add("--nnodes", type=positive, metavar="M", help="nodes of the job (default: 1, or the recipe's)")
    add("--rdzv-endpoint", "--rdzv_endpoint", default="", metavar="H[:P]", help="node 0: is it known and reached?")
    add(
        "--run-dir", type=Path, metavar="D", help="a run: findings of all its nodes; otherwise: can a run be there?"
    )
    add("--cpu", action="store_true", help="the job trains on this machine's CPUs")
    add("--preload", type=modules, metavar="MODULE,...", help="import these in a child process, as for `run`")
    add("--script", metavar="SCRIPT", help="import what this script imports from installed packages, as for `run`")
    add("-m", "--module", action="store_true", help="SCRIPT is a module, as with `python -m`")
    add(
        "--recipe",
        metavar="RECIPE",
        help="a recipe of `train`: its imports, and whether a recovery fits into memory",
    )
    add("--parameters", type=number, metavar="P", help="parameters of each rank, in place of those of a recipe")
    add("--shards", type=positive, metavar="D", help="shards of each copy of the optimizer (default: 1)")
    add("--device-memory", type=number, metavar="B", help="bytes of a device (default: as nvidia-smi says)")
    add("--json", type=Path, metavar="FILE", help="write it as JSON (-: to standard output, and nothing else)")
    add("overrides", metavar="key=value", nargs="*", help="a value to set in the recipe, by dotted key")


def doctor(options: argparse.Namespace) -> int:
    """Show what has to be changed on this machine, or on the nodes of a job.

    Raises:
        UsageError: it cannot be looked at as asked.
    """
    from checkpointless.doctor import findings, records

    _check(options)
    run_dir: Path | None = options.run_dir
    if run_dir is not None and (records.folder_of(run_dir).is_dir() or _is_run(run_dir)):
        what, found = f"all nodes of {run_dir}", _of_run(run_dir)
    else:
        what, found = "this machine", _of_machine(options)
    if options.json is not None:
        write(options.json, findings.as_json(found, what) + "\n")
    if options.json != STDOUT:
        from checkpointless.cli.findings_page import show

        show(found, what)
    return findings.exit_code(found)


def _check(options: argparse.Namespace) -> None:
    if options.overrides and options.recipe is None:
        raise UsageError(f"{options.overrides[0]} is a value for a recipe: name it with --recipe")
    if options.module and options.script is None:
        raise UsageError("-m says that --script names a module: add --script")
    if options.shards is not None and options.parameters is None:
        raise UsageError("--shards is for a number of parameters: add --parameters")
    if options.script is not None and not options.module and not Path(options.script).is_file():
        raise UsageError(f"there is no script {options.script!r}")
    if options.run_dir is not None and options.run_dir.exists() and not options.run_dir.is_dir():
        raise UsageError(f"run directory {options.run_dir} is a file: name another")


def _is_run(run_dir: Path) -> bool:
    from checkpointless.telemetry.events import EVENTS_FILE

    return (run_dir / EVENTS_FILE).is_file()


def _of_run(run_dir: Path) -> list[Finding]:
    import socket

    from checkpointless.doctor import clock, job, records
    from checkpointless.doctor.findings import Family, Finding, Severity

    try:
        found = records.read(run_dir)
    except OSError as error:
        raise UsageError(f"cannot read {run_dir}: {error.strerror}") from error
    if not found.records and not found.unreadable:
        seen = "no node has left its findings (yet)"
        todo = "look again in a minute, or run `checkpointless doctor` on each node"
        return [Finding(Family.NODES, Severity.WARNING, seen, str(records.folder_of(run_dir)), todo)]
    return job.merged(found, clock.read(), socket.gethostname())


def _of_machine(options: argparse.Namespace) -> list[Finding]:
    from checkpointless.agent.launch_config import endpoint_of
    from checkpointless.agent.ranks.rank_process import Script
    from checkpointless.doctor.node import Question, examine

    memory: list[Finding] = []
    preload: tuple[str, ...] = options.preload or ()
    if options.recipe is not None:
        from checkpointless.cli.commands.train import RECIPE_PRELOAD

        preload = preload or RECIPE_PRELOAD
    if options.recipe is not None or options.parameters is not None:
        memory = _of_memory(options)
    try:
        endpoint = endpoint_of(options.rdzv_endpoint) if options.rdzv_endpoint else None
    except ValueError as error:
        raise UsageError(str(error)) from error
    question = Question(
        ranks=options.nproc_per_node or 1,
        nodes=options.nnodes or 1,
        endpoint=endpoint,
        run_dir=options.run_dir,
        cpu=options.cpu,
        preload=preload,
        script=None if options.script is None else Script(options.script, (), options.module),
    )
    return [*examine(question, say).findings, *memory]


def _of_memory(options: argparse.Namespace) -> list[Finding]:
    """Judge the memory for a recipe or for a number of parameters, and fill in the recipe's numbers of ranks."""
    from checkpointless.doctor import memory
    from checkpointless.doctor.findings import Family, Finding, Severity

    state: State | str
    offload, source = False, "--parameters, --shards"
    if options.recipe is not None:
        state, offload, source = _of_recipe(options)
    if options.parameters is not None:
        state, source = memory.State.of(options.parameters, options.shards or 1), "--parameters, --shards"
    if isinstance(state, str):
        seen = f"the number of parameters is not known: {state}"
        return [Finding(Family.MEMORY, Severity.ADVICE, seen, source, "give --parameters and --shards")]
    given = options.device_memory
    return memory.judge(
        state,
        device_bytes=memory.device_memory() if given is None else int(given),
        host_bytes=memory.host_memory(),
        ranks=options.nproc_per_node or 1,
        offload=offload,
        source=source,
    )


def _of_recipe(options: argparse.Namespace) -> tuple[State | str, bool, str]:
    """Return the state of the fullest rank (or why it is not known), whether it is offloaded, and its source."""
    try:
        from omegaconf import OmegaConf

        from checkpointless.recipes.counting import counted
        from checkpointless.recipes.layout import check_layout, layout_of
        from checkpointless.recipes.memory import fullest, precision_of
        from checkpointless.recipes.settings import RecipeError, load
    except ImportError as error:
        raise UsageError(f"--recipe needs {error.name}: pip install -e '.[nemo]' in a clone") from error
    from checkpointless.doctor.memory import State

    source = f"the model of {options.recipe}, built without memory"
    try:
        config = load(options.recipe, options.overrides)
        layout = layout_of(config, options.nnodes, options.nproc_per_node)
        check_layout(config, layout)
        options.nnodes, options.nproc_per_node = layout.nodes, layout.ranks_per_node
        options.cpu = options.cpu or config.trainer.get("accelerator") == "cpu"
        offload = bool(OmegaConf.select(config, "checkpointless.enable_offload", default=False))
        if options.parameters is not None:  # nothing has to be counted
            return "", offload, source
        say("counting the parameters of the recipe's model (imports NeMo: 10 to 40 s)")
        stages = counted(options.recipe, options.overrides, layout)
    except RecipeError as error:
        raise UsageError(str(error)) from error
    if isinstance(stages, str):
        return stages, offload, source
    precision = precision_of(config)
    _, size = fullest(stages, layout, precision)
    mains = 4 * size.optimizer // precision.optimizer if precision.parameter < 4 else 0
    return State(size.parameters, size.gradients, size.optimizer, mains), offload, source


COMMAND = Command(
    "doctor",
    "say what a node, or all nodes of a job, lack for recoveries",
    add_doctor_options,
    doctor,
    _EPILOG,
)
