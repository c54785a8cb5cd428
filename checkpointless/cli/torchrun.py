"""torchrun's options on the command line of ``run``: each works, is accepted with one line, or is refused.

Its environment variables count, too: ``PET_NNODES=2`` stands for ``--nnodes 2``, and an option
wins over its variable.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpointless.cli.output import say
from checkpointless.cli.values import UsageError, both, count, local_ranks, nodes, port, ranks, seconds

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
_OTHER_NAMES = {"shutdown_timeout": "term_grace"}  # options that are called by another name here


def _switch(text: str) -> bool:
    return bool(int(text))


#: How the variables of the options that have a meaning, or a check, are read; the others are kept as text.
_TYPES: dict[str, Callable[[str], object]] = {
    "nnodes": nodes,
    "nproc_per_node": ranks,
    "node_rank": count,
    "max_restarts": count,
    "rdzv_endpoint": str,
    "master_addr": str,
    "master_port": port,
    "local_ranks_filter": local_ranks,
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


def add_torchrun_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only torchrun has. Every option of ``parser`` then heeds torchrun's variable for it."""
    add = parser.add_argument_group("torchrun's options, accepted for compatibility").add_argument
    add(*both("--master-addr"), metavar="H", help="with --master-port: --rdzv-endpoint H:P")
    add(*both("--master-port"), type=port, metavar="P", help="port of --master-addr")
    add(
        *both("--local-ranks-filter"),
        type=local_ranks,
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


def settle_torchrun_options(options: argparse.Namespace) -> dict[str, Any]:  # Any: of different types
    """Turn torchrun's options into those of ``run``, and report those that have no meaning.

    Args:
        options: options of ``run``; the variables among them are read, and the endpoint is set.

    Returns:
        Keyword arguments of ``LaunchConfig``.

    Raises:
        UsageError: an option contradicts another one, or is not supported.
    """
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
    settings = _rendezvous_settings(options.rdzv_conf or "")
    if options.local_ranks_filter is not None:
        settings["local_ranks_filter"] = options.local_ranks_filter
    return settings


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
