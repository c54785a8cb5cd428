"""Options of agents and coordinators: the limits of a job, and health and metrics over HTTP."""

from __future__ import annotations

import argparse
from typing import Any

from checkpointless.cli.values import UsageError, both, count, port, seconds

_HEARTBEAT_HELP = "seconds without progress until a rank counts as hung (default: ten of its steps, 30 s to 10 min)"
_RESTARTS_HELP = "restarts of the whole job, from what the script loads, where it would end (default: 0)"
_NODE_HELP = "seconds of silence until a node counts as lost (default: 10)"
_REGROUP_HELP = "seconds for all ranks to meet again (default: 120)"


def add_coordination_options(parser: argparse.ArgumentParser) -> None:
    """Add the limits of a job, and the address of health and metrics."""
    add = parser.add_argument_group("limits").add_argument
    add("--max-incidents", type=count, metavar="K", help="end the job after K incidents (default: no limit)")
    add(*both("--max-restarts"), type=count, metavar="N", help=_RESTARTS_HELP)
    add("--heartbeat-timeout", type=seconds, metavar="S", help=_HEARTBEAT_HELP)
    add("--node-timeout", type=seconds, metavar="S", help=_NODE_HELP)
    add("--regroup-timeout", type=seconds, metavar="S", help=_REGROUP_HELP)
    add = parser.add_argument_group("monitoring").add_argument
    add("--http-port", type=port, metavar="P", help="serve health and metrics over HTTP (0: any free port)")
    add("--http-host", metavar="H", help="address for --http-port (default: 127.0.0.1, this machine only)")


def coordination_settings(options: argparse.Namespace) -> dict[str, Any]:  # Any: of different types
    """Return the given ones of these options, as keyword arguments of ``LaunchConfig`` and ``CoordinatorConfig``.

    Raises:
        UsageError: there is an address for HTTP and no port.
    """
    if options.http_host is not None and options.http_port is None:
        raise UsageError("--http-host requires --http-port")
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
