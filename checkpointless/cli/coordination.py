"""The options of what coordinates a job: its limits, and health and metrics over HTTP."""

from __future__ import annotations

import argparse
from typing import Any

from checkpointless.cli.values import UsageError, both, count, port, seconds

_HEARTBEAT_HELP = "seconds after which a silent rank counts as hung (default: ten of its steps, 30 s to 10 min)"
_RESTARTS_HELP = (
    "where the job would end (no rank holds the state, a script fails again and again), begin again with what the "
    "script itself loads, at most so often (default: 0)"
)
_NODE_HELP = "seconds after which a silent node counts as lost (default: 10)"
_REGROUP_HELP = "seconds within which all ranks must meet again (default: 120)"


def add_coordination_options(parser: argparse.ArgumentParser) -> None:
    """Add the limits of a job and where health and metrics are served."""
    add = parser.add_argument_group("limits").add_argument
    add("--max-incidents", type=count, metavar="K", help="give up after so many incidents (default: no limit)")
    add(*both("--max-restarts"), type=count, metavar="N", help=_RESTARTS_HELP)
    add("--heartbeat-timeout", type=seconds, metavar="S", help=_HEARTBEAT_HELP)
    add("--node-timeout", type=seconds, metavar="S", help=_NODE_HELP)
    add("--regroup-timeout", type=seconds, metavar="S", help=_REGROUP_HELP)
    add = parser.add_argument_group("monitoring").add_argument
    add("--http-port", type=port, metavar="P", help="serve health and metrics over HTTP (0: on any free port)")
    add("--http-host", metavar="H", help="address to serve them on (default: 127.0.0.1, this machine only)")


def coordination_settings(options: argparse.Namespace) -> dict[str, Any]:  # Any: of different types
    """Return what was given of these options, as keyword arguments of ``LaunchConfig`` and ``CoordinatorConfig``.

    Raises:
        UsageError: there is an address for HTTP and no port.
    """
    if options.http_host is not None and options.http_port is None:
        raise UsageError("--http-host is where health and metrics are served if there is --http-port: add it")
    settings = {
        "max_incidents": options.max_incidents,
        "max_restarts": options.max_restarts,
        "heartbeat_timeout_s": options.heartbeat_timeout,
        "regroup_timeout_s": options.regroup_timeout,
        "node_timeout_s": options.node_timeout,
        "http_port": options.http_port,
        "http_host": options.http_host,
    }
    return {name: value for name, value in settings.items() if value is not None}
