"""The commands ``run``, ``coordinator`` and ``move``.

Each option of torchrun's works, is accepted with one line, or is refused. So does its variable, as ``PET_NNODES=2``
for ``--nnodes 2``; an option wins over it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpointless.cli.command import (
    Command,
    UsageError,
    both,
    count,
    modules,
    nodes,
    out,
    port,
    positive,
    ranks,
    say,
    seconds,
)
from checkpointless.cli.job import Program, add_coordination_options, add_job_options, config_of, launch_job
from checkpointless.system.environment import TOKEN_ENV

_VARIABLE = "PET_{}"  # torchrun's, one for each of its options
_OUTPUT = "output goes to the terminal and to the rank's log"
#: Options that have no meaning here: their short form, the name of their value (None: a switch), and why.
_ACCEPTED: dict[str, tuple[str, str | None, str]] = {
    "--standalone": ("", None, "a job of one node meets in its own agent"),
    "--rdzv-backend": ("", "B", "the agents meet in node 0's, or in `checkpointless coordinator`"),
    "--rdzv-id": ("", "ID", "endpoint, token and run directory distinguish jobs"),
    "--role": ("", "NAME", "every rank has the role 'default'"),
    "--monitor-interval": ("", "S", "the end of a process is noticed at once"),
    "--start-method": ("", "M", "ranks are forked from a process that has imported the frameworks"),
    "--run-path": ("", None, "scripts are always run like that"),
    "--redirects": ("-r", "STD", _OUTPUT),
    "--tee": ("-t", "STD", _OUTPUT),
    "--duplicate-stdout-filters": ("", "F", _OUTPUT),
    "--duplicate-stderr-filters": ("", "F", _OUTPUT),
    "--logs-specs": ("", "NAME", _OUTPUT),
    "--log-line-prefix-template": ("", "T", _OUTPUT),  # torch 2.14
    "--print-completion": ("", "SHELL", "there is no script for completion"),  # torch 2.14
    "--event-log-handler": ("", "NAME", "events are in events.jsonl of the run directory"),
    "--signals-to-handle": ("", "S,...", "SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 always reach the ranks"),
    "--local-addr": ("", "A", "the coordinator sees the address of each node"),
    "--numa-binding": ("", "MODE", "ranks are not bound to CPUs; use numactl"),
}
_BACKENDS = ("c10d", "static")
_REFUSED = {
    "--no-python": "ranks are Python processes: give a Python script, or -m MODULE",
    "--virtual-local-rank": "each rank sees all GPUs of its node and takes the one of its LOCAL_RANK",
}
_JOIN_TIMEOUT = "join_timeout"  # the key of --rdzv-conf that has a meaning
_OTHER_NAMES = {"shutdown_timeout": "term_grace_s"}  # options that are called by another name here


def _switch(text: str) -> bool:
    return bool(int(text))


def _local_ranks(text: str) -> tuple[int, ...]:
    return tuple(count(each.strip()) for each in text.split(","))


#: How the variables of the options that have a meaning, or a check, are read; the others are kept as text.
_TYPES: dict[str, Callable[[str], object]] = {
    "nnodes": nodes,
    "nproc_per_node": ranks,
    "node_rank": count,
    "max_restarts": count,
    "rdzv_endpoint": str,
    "master_addr": str,
    "master_port": port,
    "local_ranks_filter": _local_ranks,
    "rdzv_conf": str,
    "log_dir": Path,
    "shutdown_timeout": seconds,
    **dict.fromkeys(("module", "standalone", "run_path", "no_python", "virtual_local_rank"), _switch),
}


@dataclass(frozen=True)
class _Variable:
    """The default of an option whose variable is set. It is read once the option is known to be left out."""

    name: str
    text: str
    as_type: Callable[[str], object]

    def read(self) -> object:
        try:
            return self.as_type(self.text)
        except (argparse.ArgumentTypeError, ValueError) as error:
            raise UsageError(f"{self.name}={self.text}: {error}") from error


def _add_torchrun_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only torchrun has. Every option of ``parser`` then heeds torchrun's variable for it."""
    add = parser.add_argument_group("torchrun's options, accepted for compatibility").add_argument
    add(*both("--master-addr"), metavar="H", help="with --master-port: --rdzv-endpoint H:P")
    add(*both("--master-port"), type=port, metavar="P", help="port of --master-addr")
    add(
        *both("--local-ranks-filter"),
        type=_local_ranks,
        metavar="I,...",
        help="show only the output of these local ranks",
    )
    add(*both("--rdzv-conf"), metavar="K=V,...", help=f"`{_JOIN_TIMEOUT}=S`: seconds for all nodes to join")
    for flag, (short, value, why) in _ACCEPTED.items():
        names = (*filter(None, [short]), *both(flag))
        if value is None:
            add(*names, action="store_true", help=f"no meaning: {why}")
        else:
            add(*names, metavar=value, help=f"no meaning: {why}")
    for flag, why in _REFUSED.items():
        add(*both(flag), action="store_true", help=f"refused: {why}")
    for dest in (*_TYPES, *map(_dest, _ACCEPTED)):
        name = _VARIABLE.format(dest.upper())
        if os.environ.get(name):
            variable = _Variable(name, os.environ[name], _TYPES.get(dest, str))
            parser.set_defaults(**{_OTHER_NAMES.get(dest, dest): variable})


def _settle_torchrun_options(options: argparse.Namespace) -> dict[str, Any]:  # Any: of different types
    """Turn torchrun's options into keyword arguments of ``LaunchConfig``, or say that they mean nothing."""
    _read_variables(options)
    for flag, why in _REFUSED.items():
        if getattr(options, _dest(flag)):
            raise UsageError(f"{flag} is not supported: {why}")
    if options.rdzv_backend not in (None, *_BACKENDS):
        raise UsageError(f"--rdzv-backend {options.rdzv_backend} is not supported: leave it out, or use c10d")
    several = options.nnodes + options.spares > 1
    if options.standalone and several:
        raise UsageError("--standalone is for one node: leave it out, or leave out --nnodes and --spares")
    for flag, (_, _, why) in _ACCEPTED.items():
        if getattr(options, _dest(flag)):
            _no_meaning(flag, why)
    _settle_master(options, several)
    return _rendezvous_settings(options.rdzv_conf or "")


def _read_variables(options: argparse.Namespace) -> None:
    found = {dest: value for dest, value in vars(options).items() if isinstance(value, _Variable)}
    for dest, variable in found.items():
        setattr(options, dest, variable.read())
    if found:
        say(f"from the environment: {' '.join(f'{each.name}={each.text}' for each in found.values())}")


def _settle_master(options: argparse.Namespace, several: bool) -> None:
    address, number = options.master_addr, options.master_port
    given = "--master-addr" if address is not None else "--master-port"
    if address is None and number is None:
        return
    if not several:
        _no_meaning(given, "a job of one node meets in its own agent")
    elif options.rdzv_endpoint:
        _no_meaning(given, f"the nodes meet at --rdzv-endpoint {options.rdzv_endpoint}")
    elif address is None:
        raise UsageError("--master-port with several nodes needs --master-addr: the address of node 0")
    else:
        options.rdzv_endpoint = address if number is None else f"{address}:{number}"


def _rendezvous_settings(text: str) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for pair in filter(None, text.split(",")):
        key, _, value = (part.strip() for part in pair.partition("="))
        if not key or not value:
            raise UsageError(f"--rdzv-conf {text}: {pair!r} is not KEY=VALUE")
        if key != _JOIN_TIMEOUT:
            _no_meaning(f"--rdzv-conf {key}", f"only {_JOIN_TIMEOUT} has")
            continue
        try:
            settings["join_timeout_s"] = seconds(value)
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"--rdzv-conf {key}: {error}") from error
    return settings


def _no_meaning(flag: str, why: str) -> None:
    say(f"{flag} has no meaning here: {why}")


def _dest(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


_RUN_EPILOG = """\
examples:
  checkpointless run --nproc-per-node 8 train.py --lr 1e-3
  checkpointless run --nproc-per-node 8 --preload nemo.collections.llm train.py
  checkpointless run --nproc-per-node 4 --cpu -m my_package.train --steps 20
  checkpointless run --nproc-per-node 4 --record-steps --fault sigkill@backward:rank=1,step=5 train.py
  checkpointless run --nproc-per-node 8 --nnodes 4 --node-rank 2 --rdzv-endpoint node0:29400 train.py
  checkpointless run --nproc-per-node 8 --dry-run train.py     starts nothing

Arguments after SCRIPT are the script's own. With `@HPWrapper()` on the script's main function, a rank that fails is
recovered in place or replaced, while the others keep their state.
"""


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [OPTIONS] SCRIPT [ITS ARGUMENTS]"
    add = parser.add_argument
    add("-m", "--module", action="store_true", help="SCRIPT is a module, as with `python -m`")
    add(
        "--preload",
        type=modules,
        metavar="MODULE,...",
        help="import these once, before ranks are forked (default: the script's imports from installed packages)",
    )
    add("--dry-run", action="store_true", help="show what would be started; start nothing")
    add_job_options(parser)
    _add_torchrun_options(parser)
    add("script", metavar="SCRIPT", help="the training script")
    add("script_args", metavar="...", nargs=argparse.REMAINDER, help="its own arguments")


def _run(options: argparse.Namespace) -> int:
    settings = _settle_torchrun_options(options)
    if options.dry_run:
        return _dry_run(options)
    return launch_job(options, program_of(options), None, settings)


def program_of(options: argparse.Namespace) -> Program:
    script_dir = Path.cwd() if options.module else Path(options.script).resolve().parent
    _check_importable(options.preload or (), script_dir)
    return Program(
        job=options.script.rpartition(".")[2] if options.module else Path(options.script).stem,
        script=options.script,
        script_args=tuple(options.script_args),
        module=options.module,
        preload=options.preload,
    )


def _dry_run(options: argparse.Namespace) -> int:
    nodes = "this node" if options.nnodes == 1 else f"each of {options.nnodes} nodes"
    ranks = f"{options.nproc_per_node} rank{'' if options.nproc_per_node == 1 else 's'}"
    name = f"the module {options.script}" if options.module else options.script
    if not options.module and not Path(options.script).is_file():
        raise UsageError(f"there is no script {options.script}")
    out(f"would start {ranks} of {name} on {nodes}")
    return 0


def _check_importable(modules: Sequence[str], script_dir: Path) -> None:
    """Raise unless the packages of ``modules`` can be found, also in the script's folder, without importing any."""
    import importlib
    import importlib.util
    from importlib.machinery import PathFinder

    importlib.invalidate_caches()
    for module in modules:
        root = module.partition(".")[0]
        if PathFinder.find_spec(root, [str(Path.cwd()), str(script_dir), *sys.path]) is not None:
            continue
        try:
            found = importlib.util.find_spec(root)  # by all finders: an editable install has a separate one
        except ValueError:  # it is imported already, from an unknown place
            found = None
        if found is None and root not in sys.modules:
            raise UsageError(f"there is no module {module}")


RUN = Command("run", "run a script on every rank of this node, through faults", _add_run_options, _run, _RUN_EPILOG)


# --- A coordinator in a process of its own -----------------------------------------------------------------------

_COORDINATOR_EPILOG = f"""\
examples:
  checkpointless coordinator --nnodes 4 --nproc-per-node 8 --rdzv-endpoint control0:29400 --run-dir /shared/runs/1

Then start `checkpointless run` with the same --rdzv-endpoint on every node. The job then survives the loss of any
node, node 0 included. Set {TOKEN_ENV} and the limits as on the nodes.
"""


def _add_coordinator_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--nnodes", type=positive, required=True, metavar="M", help="nodes of the job")
    add("--nproc-per-node", "--nproc_per_node", type=positive, default=1, metavar="N", help="ranks (default: 1)")
    where = "where to listen; the same for all nodes"
    add(*both("--rdzv-endpoint"), required=True, metavar="H[:P]", help=where)
    add("--run-dir", type=Path, metavar="D", help="run directory of the job (default: no events)")
    add_coordination_options(parser)


def _coordinate(options: argparse.Namespace) -> int:
    from checkpointless.launcher.agent.launch import launch_coordinator
    from checkpointless.launcher.coordinator.job_config import JobConfig

    config = config_of(JobConfig, options, token=os.environ.pop(TOKEN_ENV, ""))
    try:
        return launch_coordinator(config, say)
    except ValueError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"cannot listen at {options.rdzv_endpoint}: {error.strerror or error}") from error


# --- A node that is to be left ------------------------------------------------------------------------------------

_MOVE_EPILOG = f"""\
examples:
  checkpointless move --node 3 --rdzv-endpoint node0:29400

A spare takes the ranks of the node over at the next step boundary; no step is repeated, and then the node is idle.
Give the --rdzv-endpoint of the job, and its token in {TOKEN_ENV}. Exit status: 0: it has moved;
1: it stays, for the reason that is printed; 2: the coordinator was not reached, or the move still goes on.
"""


def _add_move_options(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--node", type=count, metavar="N", help="number of the node")
    which.add_argument("--rank", type=count, metavar="R", help="a rank of the node")
    add = parser.add_argument
    add(*both("--rdzv-endpoint"), required=True, metavar="H[:P]", help="where the job's coordinator listens")
    add("--timeout", type=seconds, default=600.0, metavar="S", help="seconds to wait for the end (default: 600)")


def _move(options: argparse.Namespace) -> int:
    from checkpointless.launcher.agent.links import JoinError, move_node
    from checkpointless.launcher.coordinator.job_config import JobConfig

    try:
        config = JobConfig(
            nproc_per_node=1, rdzv_endpoint=options.rdzv_endpoint, token=os.environ.get(TOKEN_ENV, "")
        )
        config.check_meeting()
        node, rank = (-1 if each is None else each for each in (options.node, options.rank))
        return 0 if move_node(config, node, rank, say, options.timeout) else 1
    except TimeoutError:
        raise UsageError(f"the move is not over after {options.timeout:g} s, and goes on") from None
    except (JoinError, OSError, ValueError) as error:
        raise UsageError(str(error)) from error


MOVE = Command(
    "move", "move the ranks of a node to a spare, without a fault", _add_move_options, _move, _MOVE_EPILOG
)


COORDINATOR = Command(
    "coordinator",
    "coordinate a job of several nodes from outside of them",
    _add_coordinator_options,
    _coordinate,
    _COORDINATOR_EPILOG,
)
