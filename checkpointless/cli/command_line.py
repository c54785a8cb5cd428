"""The command line: ``checkpointless run | train | coordinator | demo | verify | report | faults``.

This module imports nothing heavy; each command imports what it needs when it runs, so that ``--help`` and wrong
options are answered at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from checkpointless.cli.chaos import (
    add_demo_options,
    add_job_options,
    check_goes_with_chaos,
    demo_chaos,
    draw_into,
    judge_chaos,
)
from checkpointless.cli.report import EPILOG as REPORT_EPILOG
from checkpointless.cli.report import add_report_options, report_command
from checkpointless.cli.train import EPILOG as TRAIN_EPILOG
from checkpointless.cli.train import add_train_options, check_train, dry_run
from checkpointless.cli.values import UsageError, count, modules, port, positive, seconds
from checkpointless.telemetry.log_level import LEVELS, LOG_LEVEL_ENV, apply_log_level

if TYPE_CHECKING:
    from checkpointless.faults.chaos import Outcome
    from checkpointless.faults.spec import FaultSpec

PROG = "checkpointless"
RUNS_DIR = Path("runs")
RECIPE_RUNNER = "checkpointless.recipes.runner"
RECIPE_PRELOAD = (
    "nemo.collections.llm",
    "checkpointless.strategies",
    "checkpointless.callbacks",
    "checkpointless.recovery",
    RECIPE_RUNNER,
)
USAGE_EXIT_CODE = 2
BROKEN_PIPE_EXIT_CODE = 128 + 13  # what a shell reports for a process that SIGPIPE ended

_EPILOG = """\
examples:
  checkpointless demo                                 see it work: a small GPT, two faults, equal losses
  checkpointless run --nproc-per-node 8 train.py      run a script in which `@HPWrapper()` stands
  checkpointless train tiny_gpt_cpu --cpu --nproc-per-node 4 trainer.max_steps=20
  checkpointless report runs/20260101T120000Z-train   what happened, and how long each stage took
  checkpointless verify runs/a runs/b                 the same losses and parameters, to the bit?
  checkpointless faults                               which faults can be caused on purpose

`checkpointless COMMAND --help` explains a command.
"""
_RUN_EPILOG = """\
examples:
  checkpointless run --nproc-per-node 8 train.py --lr 1e-3
  checkpointless run --nproc-per-node 8 --preload nemo.collections.llm train.py
  checkpointless run --nproc-per-node 4 --cpu -m my_package.train --steps 20
  checkpointless run --nproc-per-node 4 --record-steps --fault sigkill@backward:rank=1,step=5 train.py
  checkpointless run --nproc-per-node 8 --nnodes 4 --node-rank 2 --rdzv-endpoint node0:29400 train.py

What follows the script is the script's own. A rank that fails is recovered in place or replaced, while the others
keep their state; that needs `@HPWrapper()` on the script's main function.
"""
_COORDINATOR_EPILOG = """\
examples:
  checkpointless coordinator --nnodes 4 --nproc-per-node 8 --rdzv-endpoint control0:29400 --run-dir /shared/runs/1

Then `checkpointless run` with the same --rdzv-endpoint on every node. No node is special any more: also the loss of
node 0 is recovered from. CHECKPOINTLESS_TOKEN must be the same as on the nodes, and so should the limits be.
"""
_DEMO_EPILOG = """\
examples:
  checkpointless demo
  checkpointless demo --nproc 4 --layout tp=2 --dropout 0.1 --fault sigkill@optimizer:rank=1,step=5
  checkpointless demo --nproc 8 --layout tp=2,pp=2 --steps 6 --fault hang@backward:rank=3,step=4

Without --fault there are two: an exception in a backward pass and a SIGKILL inside an optimizer step.
Exit status: 0 if every fault happened and both runs are equal to the bit, 1 if not.
"""
_HEARTBEAT_HELP = "seconds after which a silent rank counts as hung (default: ten of its steps, 30 s to 10 min)"
_RECORD_HELP = (
    "record for `verify` what each rank computes: per step loss, learning rates, loss scale and digests of "
    "parameters, buffers, callbacks, module and data; validations; checkpoints. Takes a pass over the model's "
    "bytes in each step"
)
_FAULT_HELP = (
    "cause a fault on purpose, e.g. sigkill@backward:rank=1,step=5; repeatable (see `checkpointless faults`)"
)


class _Parser(argparse.ArgumentParser):
    """Argument parser that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(_error_line(f"{message} (see `{self.prog} --help`)"))
        sys.exit(USAGE_EXIT_CODE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments; None: those of this process.

    Returns:
        The exit status of the command, or 2 after one line on standard error if it cannot be done as asked.
    """
    parser = _parser()
    options, extra = parser.parse_known_args(argv)
    overrides = [text for text in extra if "=" in text and not text.startswith("-")]
    if options.command is _train and len(overrides) == len(extra):
        options.overrides += overrides  # argparse takes only those before the first option
    elif extra:
        parser.error(f"unrecognized arguments: {' '.join(extra)}")
    command: Callable[[argparse.Namespace], int] = options.command
    warnings.filterwarnings("ignore", "The pynvml package is deprecated", FutureWarning)  # torch imports it
    try:
        return command(options)
    except UsageError as error:
        sys.stderr.write(_error_line(str(error)))
        return USAGE_EXIT_CODE
    except BrokenPipeError:  # the reader of standard output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE_EXIT_CODE


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROG,
        description="Training jobs that survive faults in memory: no checkpoint is read and no step is repeated.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, command: Callable[[argparse.Namespace], int], what: str, epilog: str = "") -> Any:
        added = commands.add_parser(
            name,
            help=what,
            description=what[0].upper() + what[1:] + ".",
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        added.set_defaults(command=command)
        return added

    run = add("run", _run, "run a script on every rank of this node, through faults", _RUN_EPILOG)
    _add_job_options(run)
    run.add_argument(
        "--preload",
        type=modules,
        metavar="MODULE,...",
        help="import these once and fork ranks with them, so that a replaced rank is ready at once "
        "(default: what the script imports from installed packages)",
    )
    run.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as with `python -m`")
    run.add_argument("script", metavar="SCRIPT", help="the training script")
    run.add_argument("script_args", metavar="...", nargs=argparse.REMAINDER, help="its own arguments")

    train = add("train", _train, "train a NeMo recipe, through faults", TRAIN_EPILOG)
    _add_job_options(train, ranks="the recipe's")
    add_train_options(train)

    alone = add(
        "coordinator", _coordinator, "coordinate a job of several nodes from outside of them", _COORDINATOR_EPILOG
    )
    alone.add_argument("--nnodes", type=positive, required=True, metavar="M", help="nodes of the job")
    alone.add_argument(
        "--nproc-per-node", "--nproc_per_node", type=positive, default=1, metavar="N", help="ranks (default: 1)"
    )
    alone.add_argument(
        "--rdzv-endpoint", "--rdzv_endpoint", required=True, metavar="H[:P]", help="where to listen; for all nodes"
    )
    alone.add_argument("--run-dir", type=Path, metavar="D", help="the job's run directory (default: no events)")
    _add_limits(alone)
    _add_http(alone)

    demo = add("demo", _demo, "train a small GPT with and without faults and compare the two", _DEMO_EPILOG)
    demo.add_argument(
        "--nproc", type=positive, metavar="N", help="CPU ranks, up to 32 (default: 4; chaos: up to 8)"
    )
    demo.add_argument("--steps", type=positive, metavar="N", help="steps of each run (default: 10; chaos: 6)")
    demo.add_argument("--layout", default="", metavar="tp=N,...", help="tp, pp, ep and cp sizes (default: all 1)")
    demo.add_argument("--dropout", type=float, default=0.0, metavar="P", help="in [0, 1) (default: 0)")
    demo.add_argument("--fault", dest="faults", action="append", default=[], metavar="SPEC", help=_FAULT_HELP)
    demo.add_argument("--run-dir", type=Path, metavar="D", help="where both runs are kept (default: under runs/)")
    add_demo_options(demo)

    verify = add("verify", _verify, "compare what was recorded of two runs, bit by bit")
    verify.add_argument("run_a", type=Path, metavar="RUN_A", help="run directory of a run with --record-steps")
    verify.add_argument("run_b", type=Path, metavar="RUN_B", help="another one")

    report = add("report", report_command, "show a run's incidents, and what its time was spent on", REPORT_EPILOG)
    add_report_options(report)

    add("faults", _faults, "list the faults that can be caused on purpose")
    return parser


def _add_job_options(parser: argparse.ArgumentParser, ranks: str = "1") -> None:
    add = parser.add_argument
    add(
        "--nproc-per-node",
        "--nproc_per_node",
        type=positive,
        default=1,
        metavar="N",
        help=f"ranks (default: {ranks})",
    )
    add("--nnodes", type=positive, default=1, metavar="M", help="nodes of the job (default: 1)")
    add("--node-rank", "--node_rank", type=count, default=0, metavar="I", help="this node's number, from 0")
    add("--rdzv-endpoint", "--rdzv_endpoint", default="", metavar="H[:P]", help="node 0, as all nodes reach it")
    add("--spares", type=count, default=0, metavar="S", help="nodes M, M+1, ... that wait to replace a lost one")
    add("--run-dir", type=Path, metavar="D", help="where events are written (default: runs/TIME-NAME)")
    add("--cpu", action="store_true", help="let Megatron-core and NeMo train on this machine's CPUs")
    _add_limits(parser)
    _add_http(parser)
    add("--log-level", choices=tuple(LEVELS), help="how much ranks and agent log (default: warning; debug: all)")
    add("--record-steps", action="store_true", help=_RECORD_HELP)
    add("--fault", dest="faults", action="append", default=[], metavar="SPEC", help=_FAULT_HELP)
    add_job_options(parser)


def _add_http(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--http-port", type=port, metavar="P", help="serve health and metrics over HTTP (0: on any free port)")
    add("--http-host", metavar="H", help="address to serve them on (default: 127.0.0.1, this machine only)")


def _check_http(options: argparse.Namespace) -> None:
    if options.http_host is not None and options.http_port is None:
        raise UsageError("--http-host is where health and metrics are served if there is --http-port: add it")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--max-incidents", type=count, metavar="K", help="give up after so many incidents")
    add("--heartbeat-timeout", type=seconds, metavar="S", help=_HEARTBEAT_HELP)
    add("--node-timeout", type=seconds, metavar="S", help="seconds after which a silent node counts as lost")
    add("--regroup-timeout", type=seconds, metavar="S", help="seconds within which all ranks must meet again")


# --- commands -----------------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> int:
    beside = Path.cwd() if options.module else Path(options.script).resolve().parent
    _check_importable(options.preload or (), beside)
    name = options.script.rpartition(".")[2] if options.module else Path(options.script).stem
    world_size = options.nproc_per_node * options.nnodes
    expected = draw_into(options, world_size, None)
    specs = _specs(options.faults, world_size, None, options.nnodes, options.cpu)
    job = {"script": options.script, "script_args": tuple(options.script_args), "module": options.module}
    return _launch(options, name, specs, expected, preload=options.preload, **job)


def _train(options: argparse.Namespace) -> int:
    config = check_train(options, _has_cuda)
    if options.dry_run:
        return dry_run(options, config)
    max_steps = config.trainer.get("max_steps")
    last = max_steps if isinstance(max_steps, int) and max_steps > 0 else None  # -1: all steps of the epochs
    world_size = options.nproc_per_node * options.nnodes
    expected = draw_into(options, world_size, last)
    specs = _specs(options.faults, world_size, last, options.nnodes, options.cpu)
    return _launch(
        options,
        Path(options.recipe).stem,
        specs,
        expected,
        script=RECIPE_RUNNER,
        script_args=(options.recipe, *options.overrides),
        module=True,
        preload=RECIPE_PRELOAD,
    )


def _launch(
    options: argparse.Namespace, name: str, specs: Sequence[FaultSpec], expected: Outcome | None, **job: Any
) -> int:
    from checkpointless.agent.launch import LaunchConfig, launch
    from checkpointless.cli.terminal import Terminal
    from checkpointless.faults.ledger import not_fired
    from checkpointless.telemetry.steps import RECORDED, STEPS_DIR
    from checkpointless.wire.handshake import TOKEN_ENV

    limits: dict[str, Any] = {
        "max_incidents": options.max_incidents,
        "heartbeat_timeout_s": options.heartbeat_timeout,
        "regroup_timeout_s": options.regroup_timeout,
        "node_timeout_s": options.node_timeout,
        "http_port": options.http_port,
        "http_host": options.http_host,
    }
    _check_http(options)
    if options.log_level is not None:
        os.environ[LOG_LEVEL_ENV] = options.log_level  # the ranks inherit it
        apply_log_level()
    run_dir = _new_run_dir(options.run_dir, name, shared=options.nnodes + options.spares > 1)
    try:
        config = LaunchConfig(
            nproc_per_node=options.nproc_per_node,
            nnodes=options.nnodes,
            node_rank=options.node_rank,
            spares=options.spares,
            rdzv_endpoint=options.rdzv_endpoint,
            token=os.environ.pop(TOKEN_ENV, ""),  # not for the ranks
            run_dir=run_dir,
            cpu=options.cpu,
            faults=tuple(options.faults),
            record_steps=options.record_steps,
            **job,
            **{limit: value for limit, value in limits.items() if value is not None},
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make run directory {run_dir}: {error.strerror}") from error
    where = "" if config.is_alone else f" on node {config.node_rank} of {config.nnodes}"
    _say(f"{config.nproc_per_node} ranks of {name}{where}; events in {run_dir}")
    if options.record_steps:
        _say(
            f"recorded into {run_dir / STEPS_DIR}, which takes a pass over the model's bytes each step: {RECORDED}"
        )
    if options.faults:
        _say(f"faults will be caused on purpose: {' '.join(options.faults)}")
    with Terminal(_say, run_dir, config.node_rank) as terminal:
        status = launch(config, terminal.say)
    missing = not_fired(specs, run_dir)
    for text in missing:
        _say(f"fault {text} did not happen, or not as often as asked for: the run never came there")
    if not config.is_alone:  # other nodes may have recorded faults in their run directories
        return status
    problem = "" if expected is None else judge_chaos(run_dir, status, expected)
    if problem:
        _say(f"chaos: {problem}; the same again: --chaos {options.chaos} --seed {options.seed or 0}")
    return status or int(bool(missing or problem))


def _coordinator(options: argparse.Namespace) -> int:
    from checkpointless.agent.launch import CoordinatorConfig, launch_coordinator
    from checkpointless.wire.handshake import TOKEN_ENV

    _check_http(options)
    limits: dict[str, Any] = {
        "max_incidents": options.max_incidents,
        "heartbeat_timeout_s": options.heartbeat_timeout,
        "regroup_timeout_s": options.regroup_timeout,
        "node_timeout_s": options.node_timeout,
        "http_port": options.http_port,
        "http_host": options.http_host,
    }
    try:
        config = CoordinatorConfig(
            nnodes=options.nnodes,
            nproc_per_node=options.nproc_per_node,
            rdzv_endpoint=options.rdzv_endpoint,
            token=os.environ.pop(TOKEN_ENV, ""),
            run_dir=options.run_dir,
            **{limit: value for limit, value in limits.items() if value is not None},
        )
        return launch_coordinator(config, _say)
    except ValueError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"cannot listen at {options.rdzv_endpoint}: {error.strerror or error}") from error


def _demo(options: argparse.Namespace) -> int:
    check_goes_with_chaos(options)
    if options.chaos is not None:
        return demo_chaos(options, _new_run_dir(options.run_dir, "chaos"))
    options.nproc, options.steps = options.nproc or 4, options.steps or 10
    from checkpointless.demo.config import DemoConfig, DemoError, parse_layout

    middle, late = max(1, options.steps * 4 // 10), max(1, options.steps * 7 // 10)
    faults = options.faults or [
        f"exception@backward:rank={options.nproc // 2},step={middle}",
        f"sigkill@optimizer:rank={min(1, options.nproc - 1)},step={late}",
    ]
    try:
        config = DemoConfig(
            nproc=options.nproc,
            steps=options.steps,
            layout=parse_layout(options.layout),
            dropout=options.dropout,
            faults=tuple(faults),
            run_dir=options.run_dir,
        )
    except DemoError as error:
        raise UsageError(str(error)) from error
    _specs(faults, options.nproc, options.steps, cpu=True)
    _check_can_be_made(options.run_dir)
    try:
        from checkpointless.demo.run import run_demo
    except ImportError as error:
        raise UsageError(f"the demo needs {error.name}: pip install 'checkpointless[nemo]'") from error
    return run_demo(config)


def _verify(options: argparse.Namespace) -> int:
    from checkpointless.cli.tables import console, verdict_table
    from checkpointless.report.verify import compare
    from checkpointless.telemetry.steps import read_steps

    steps = []
    for run_dir in (options.run_a, options.run_b):
        _check_run_dir(run_dir)
        try:
            steps.append(read_steps(run_dir))
        except (OSError, ValueError) as error:
            raise UsageError(str(error)) from error
    verdict = compare(*steps)
    console().print(verdict_table(verdict, steps[0], steps[1], (str(options.run_a), str(options.run_b))))
    _out(verdict.sentence)
    return 0 if verdict.equal else 1


def _faults(_options: argparse.Namespace) -> int:
    from checkpointless.cli.tables import console, support_table
    from checkpointless.faults.spec import FaultPhase

    console().print(support_table())
    _out(f"phases: {', '.join(phase.value for phase in FaultPhase)}")
    _out("for example: --fault exception@forward:rank=2,step=7 --fault sigkill@optimizer:rank=1,step=5")
    return 0


# --- checking and saying ------------------------------------------------------------------------------------------


def _specs(
    texts: Sequence[str], world_size: int, max_steps: int | None, nnodes: int = 1, cpu: bool = False
) -> tuple[FaultSpec, ...]:
    from checkpointless.faults.spec import NODE_KINDS, FaultKind, FaultSpecError, parse_all, validate

    try:
        specs = parse_all(texts, world_size, max_steps)
        if any(spec.kind is FaultKind.CUDA for spec in specs):
            validate(specs, world_size, max_steps, cuda=not cpu and _has_cuda())
    except FaultSpecError as error:
        raise UsageError(str(error)) from error
    for spec in specs:
        if spec.kind in NODE_KINDS and nnodes == 1:
            raise UsageError(f"fault {spec.text!r}: a node can only be lost in a job of several (--nnodes)")
    return specs


def _has_cuda() -> bool:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warnings about its own imports
        import torch
    return torch.cuda.device_count() > 0  # asks NVML first, without initialising CUDA: ranks are forked from here


def _check_importable(modules: Sequence[str], beside: Path) -> None:
    """Raise unless the packages of ``modules`` can be found, without importing any.

    Args:
        modules: dotted names of the modules.
        beside: folder of the script, from which the script can import too.
    """
    import importlib
    import importlib.util
    from importlib.machinery import PathFinder

    importlib.invalidate_caches()
    for module in modules:
        root = module.partition(".")[0]
        if PathFinder.find_spec(root, [str(Path.cwd()), str(beside), *sys.path]) is not None:
            continue
        try:
            found = importlib.util.find_spec(root)  # by all finders: an editable install has a separate one
        except ValueError:  # it is imported already, from an unknown place
            found = None
        if found is None and root not in sys.modules:
            raise UsageError(f"there is no module {module}")


def _check_run_dir(run_dir: Path) -> None:
    if not run_dir.is_dir():
        raise UsageError(f"there is no run directory {run_dir}")


def _check_can_be_made(run_dir: Path | None) -> None:
    """Raise if a run directory cannot be created for a reason that is known already."""
    places = [] if run_dir is None else [run_dir, *run_dir.parents]
    there = next((place for place in places if place.exists()), Path.cwd())
    if not there.is_dir():
        raise UsageError(f"cannot make run directory {run_dir}: {there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"cannot make run directory {run_dir}: nothing may be written into {there}")


def _new_run_dir(asked: Path | None, name: str, shared: bool = False) -> Path:
    """Return the directory of a new run; refuse one that already holds a run, because the two would mix.

    Args:
        asked: directory that the user asked for; None: a new one under :data:`RUNS_DIR`.
        name: name of the run, for the new directory's name.
        shared: whether other nodes of the same run, or this node's predecessor, may have written into it.
    """
    if asked is None:
        started = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
        asked = RUNS_DIR / f"{started}-{name}"
        if asked.exists():
            asked = RUNS_DIR / f"{started}-{name}-{os.getpid()}"
    if asked.exists() and not asked.is_dir():
        raise UsageError(f"run directory {asked} is a file: name another")
    if not shared and asked.exists() and any(asked.iterdir()):
        raise UsageError(f"run directory {asked} is not empty: name a new one")
    return asked


def _say(line: str) -> None:
    """Print a line about a job to standard error, besides what its ranks print."""
    shown = "".join(each if each.isprintable() or each in "\n\t" else repr(each)[1:-1] for each in line)
    sys.stderr.write(f"{PROG}: {shown}\n")
    sys.stderr.flush()


def _out(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _error_line(message: str) -> str:
    return f"{PROG}: error: {' '.join(message.split())}\n"
