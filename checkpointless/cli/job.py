"""A job on this node: the options that commands share, of jobs, limits, monitoring and faults, and its launch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from checkpointless.cli.command import (
    RUNS_DIR,
    UsageError,
    both,
    count,
    has_cuda,
    new_run_dir,
    nodes,
    port,
    ranks,
    say,
    seconds,
)
from checkpointless.observability.telemetry.scribe import LEVELS, LOG_LEVEL_ENV, apply_log_level
from checkpointless.observability.telemetry.wording import plural
from checkpointless.system.environment import DEVICE_CHECK_ENV, DEVICE_CHECK_TIMEOUT_ENV, TOKEN_ENV

if TYPE_CHECKING:
    from checkpointless.faults.spec import FaultSpec
    from checkpointless.launcher.agent.launch import LaunchConfig
    from checkpointless.launcher.coordinator.job_config import JobConfig

_Config = TypeVar("_Config", bound="JobConfig")
_FAULT_HELP = "inject a fault, e.g. sigkill@backward:rank=1,step=5; repeatable (list: `checkpointless faults`)"


def add_fault_option(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--fault", dest="faults", action="append", default=[], metavar="SPEC", help=_FAULT_HELP)


def fault_specs(
    texts: Sequence[str], world_size: int, max_steps: int | None, nnodes: int = 1, cpu: bool = False
) -> tuple[FaultSpec, ...]:
    """Return the faults that were asked for; raise :class:`UsageError` if one cannot happen in this job."""
    from checkpointless.faults.spec import FaultKind, FaultSpecError, parse_all, validate

    try:
        specs = parse_all(texts, world_size, max_steps)
        if any(spec.kind is FaultKind.CUDA for spec in specs):
            validate(specs, world_size, max_steps, cuda=not cpu and has_cuda())
    except FaultSpecError as error:
        raise UsageError(str(error)) from error
    for spec in specs:
        if spec.kind.is_of_node and nnodes == 1:
            raise UsageError(f"fault {spec.text!r}: a node can only be lost in a job of several (--nnodes)")
    return specs


_HEARTBEAT_HELP = "seconds without progress until a rank counts as hung (default: ten of its steps, 30 s to 10 min)"
_RESTARTS_HELP = "restarts of the whole job, from what the script loads, where it would end (default: 0)"
_NODE_HELP = "seconds of silence until a node counts as lost (default: 10)"
_STRAGGLERS_HELP = "move the node of a rank that is slow to a spare (default: report it)"
_REGROUP_HELP = "seconds for all ranks to meet again (default: 120)"


def add_coordination_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("limits").add_argument
    add("--max-incidents", type=count, metavar="K", help="end the job after K incidents (default: no limit)")
    add(*both("--max-restarts"), type=count, metavar="N", help=_RESTARTS_HELP)
    add("--heartbeat-timeout", dest="heartbeat_timeout_s", type=seconds, metavar="S", help=_HEARTBEAT_HELP)
    add("--node-timeout", dest="node_timeout_s", type=seconds, metavar="S", help=_NODE_HELP)
    add("--regroup-timeout", dest="regroup_timeout_s", type=seconds, metavar="S", help=_REGROUP_HELP)
    add("--move-stragglers", action="store_true", help=_STRAGGLERS_HELP)
    add = parser.add_argument_group("monitoring").add_argument
    add("--http-port", type=port, metavar="P", help="serve health and metrics over HTTP (0: any free port)")
    add("--http-host", metavar="H", help="address for --http-port (default: 127.0.0.1, this machine only)")


def config_of(kind: type[_Config], options: argparse.Namespace, **more: Any) -> _Config:  # Any: of its fields
    """Return the configuration of a job: an option of a field's name gives that field, if it was given."""
    if getattr(options, "http_host", None) is not None and options.http_port is None:
        raise UsageError("--http-host requires --http-port")
    given = {each.name: getattr(options, each.name, None) for each in fields(kind)}
    try:
        return kind(**{name: value for name, value in given.items() if value is not None} | more)
    except ValueError as error:
        raise UsageError(str(error)) from error


_WORST = 2  # findings that are said before a job
_STRICT_HELP = "end the job if a redone step is not exact (default: report it)"
_RECORD_HELP = (
    "record loss, learning rates and digests of all state in each step, validations and checkpoints, for `verify`"
)
_ENDPOINT_HELP = "address of node 0, or of the coordinator, for all nodes (default port: 29400)"
_TERM_GRACE_HELP = "seconds for ranks to end after SIGTERM, SIGINT or SIGHUP (default: 30)"
_EXIT_GRACE_HELP = "seconds that a rank may be idle after its script before it is ended (default: 30)"
_DEVICE_CHECK_HELP = "command that must exit with 0 before a rank's process is started again (default: none)"
_CHECK_TIMEOUT_HELP = "seconds for --device-check, less than --regroup-timeout (default: 30)"
_ON_SIGTERM_HELP = "what SIGTERM to the agent does: end the job, or drain the node onto a spare (default: end)"
_NOTICE_HELP = "command that is run every 5 s; when it exits with 0, the node is drained (default: none)"
_LOG_BYTES_HELP = "size of a rank's log, such as 200M, in four files; the oldest is deleted (default: 1G)"


_FACTORS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_LEAST_BYTES = 64 << 10


def _nbytes(text: str) -> int:
    number, factor = (text[:-1], _FACTORS[text[-1]]) if text[-1:] in _FACTORS else (text, 1)
    if not number.isascii() or not number.isdecimal() or len(number) > 12 or int(number) * factor < _LEAST_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes of at least 64K, such as 1G")
    return int(number) * factor


@dataclass(frozen=True)
class Program:
    """What every rank of a job runs: fields of ``LaunchConfig``."""

    job: str
    script: str
    script_args: tuple[str, ...]
    module: bool
    preload: tuple[str, ...] | None


def add_job_options(parser: argparse.ArgumentParser, default_ranks: str = "1") -> None:
    """Add the options of a job; ``default_ranks`` is the default number of ranks, as ``--help`` shows it."""
    add = parser.add_argument
    help_text = f"ranks: a number, or gpu, cpu or auto to count them (default: {default_ranks})"
    add(*both("--nproc-per-node"), type=ranks, default=1, metavar="N", help=help_text)
    add("--cpu", action="store_true", help="let Megatron-core and NeMo train on CPUs")
    add("--run-dir", type=Path, metavar="D", help="directory of the run (default: runs/TIME-NAME)")
    add(*both("--log-dir"), type=Path, metavar="D", help="directory of the logs (default: RUN_DIR/logs)")
    add("--log-bytes", type=_nbytes, default=1 << 30, metavar="N", help=_LOG_BYTES_HELP)
    add("--log-level", choices=tuple(LEVELS), help="log level of ranks and agent (default: warning)")
    add("--device-check", default=os.environ.get(DEVICE_CHECK_ENV, ""), metavar="CMD", help=_DEVICE_CHECK_HELP)
    limit_s = os.environ.get(DEVICE_CHECK_TIMEOUT_ENV) or None
    dest = "device_check_timeout_s"
    add("--device-check-timeout", dest=dest, type=seconds, default=limit_s, metavar="S", help=_CHECK_TIMEOUT_HELP)
    add("--on-sigterm", choices=("end", "drain"), default="end", help=_ON_SIGTERM_HELP)
    add("--notice", default="", metavar="CMD", help=_NOTICE_HELP)
    add("--strict", action="store_true", help=_STRICT_HELP)
    names = ("--term-grace", *both("--shutdown-timeout"))
    add(*names, dest="term_grace_s", type=seconds, metavar="S", help=_TERM_GRACE_HELP)
    add("--exit-grace", dest="exit_grace_s", type=seconds, metavar="S", help=_EXIT_GRACE_HELP)
    add = parser.add_argument_group("several nodes").add_argument
    add("--nnodes", type=nodes, default=1, metavar="M", help="nodes of the job (default: 1)")
    add(*both("--node-rank"), type=count, default=0, metavar="I", help="this node's number, from 0")
    add(*both("--rdzv-endpoint"), default="", metavar="H[:P]", help=_ENDPOINT_HELP)
    add("--spares", type=count, default=0, metavar="S", help="nodes from M on that wait to replace a lost one")
    add_coordination_options(parser)
    tests = parser.add_argument_group("fault injection")
    tests.add_argument("--record-steps", action="store_true", help=_RECORD_HELP)
    add_fault_option(tests)


def launch_job(
    options: argparse.Namespace, program: Program, steps: int | None, more: Mapping[str, Any] | None = None
) -> int:
    """Run this node's part of a job to its end; return its status, or 1 if a requested fault did not happen."""
    from checkpointless.cli.terminal import Terminal
    from checkpointless.faults.ledger import not_fired
    from checkpointless.launcher.agent.launch import launch

    world_size = options.nproc_per_node * options.nnodes
    specs = fault_specs(options.faults, world_size, steps, options.nnodes, options.cpu)
    config = _configured(options, program, more or {})
    run_dir = config.run_dir
    _announce(config)
    with Terminal(say, run_dir, config.node_rank, config.logs) as terminal:
        status = launch(config, terminal.say)
    if config.node_rank == 0 and (last := terminal.closing_line(status)):
        say(last)
    missing = not_fired(specs, run_dir)
    for text in missing:
        say(f"fault {text} did not happen as often as asked for: {_why_not(text, is_script=steps is None)}")
    if not config.is_alone:  # other nodes may have recorded faults in their run directories
        return status
    return status or int(bool(missing))


def _why_not(text: str, is_script: bool) -> str:
    """Return why a fault did not happen, as far as that is known; the loop of a script may be one of its own."""
    from checkpointless.faults.spec import ANNOUNCED_BY_FRAMEWORKS, parse

    phase = parse(text).phase
    why = "the run never reached that point"
    if not is_script or phase not in ANNOUNCED_BY_FRAMEWORKS:
        return why
    name = phase.value
    return f"{why} (a loop of your own reaches {name} only if it calls caller.enter_phase({name!r}, step))"


def _configured(options: argparse.Namespace, program: Program, more: Mapping[str, Any]) -> LaunchConfig:
    from checkpointless.launcher.agent.launch import LaunchConfig

    if options.log_level is not None:
        os.environ[LOG_LEVEL_ENV] = options.log_level  # the ranks inherit it
        apply_log_level()
    known = {"run_dir": options.run_dir or RUNS_DIR, "faults": tuple(options.faults), **vars(program), **more}
    config = config_of(LaunchConfig, options, token=os.environ.pop(TOKEN_ENV, ""), **known)  # not for the ranks
    try:
        if config.log_dir is not None:
            config.log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the directory of the logs {config.log_dir}: {error.strerror}") from error
    return replace(config, run_dir=new_run_dir(options.run_dir, program.job, shared=not config.is_alone))


def _announce(config: LaunchConfig) -> None:
    from checkpointless.doctor.findings import worst_first
    from checkpointless.doctor.node import quick

    where = "" if config.is_alone else f" on node {config.node_rank} of {config.nnodes}"
    ranks = plural(config.nproc_per_node, "rank")
    say(f"{ranks} of {config.job}{where}; events in {config.run_dir}")
    if config.record_steps:
        say("each step is recorded for `checkpointless verify`: one pass over the model each")
    if config.faults:
        say(f"faults will be injected: {' '.join(config.faults)}")
    for each in worst_first(quick(config.nproc_per_node, config.cpu, os.environ))[:_WORST]:
        say(f"{each.headline} (all findings: checkpointless doctor)")
