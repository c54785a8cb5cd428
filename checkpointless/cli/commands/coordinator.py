"""The command ``coordinator``: a coordinator in a process of its own."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from checkpointless.cli.command import Command, say
from checkpointless.cli.job import add_coordination_options, coordination_settings
from checkpointless.cli.values import UsageError, positive
from checkpointless.system.environment import TOKEN_ENV

_EPILOG = f"""\
examples:
  checkpointless coordinator --nnodes 4 --nproc-per-node 8 --rdzv-endpoint control0:29400 --run-dir /shared/runs/1

Then start `checkpointless run` with the same --rdzv-endpoint on every node. The job then survives the loss of any
node, node 0 included. Set {TOKEN_ENV} and the limits as on the nodes.
"""


def _add_coordinator_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``coordinator``."""
    add = parser.add_argument
    add("--nnodes", type=positive, required=True, metavar="M", help="nodes of the job")
    add("--nproc-per-node", "--nproc_per_node", type=positive, default=1, metavar="N", help="ranks (default: 1)")
    add(
        "--rdzv-endpoint",
        "--rdzv_endpoint",
        required=True,
        metavar="H[:P]",
        help="where to listen; the same for all nodes",
    )
    add("--run-dir", type=Path, metavar="D", help="run directory of the job (default: no events)")
    add_coordination_options(parser)


def coordinate(options: argparse.Namespace) -> int:
    """Coordinate a job until it is over.

    Raises:
        UsageError: an option is wrong, or the endpoint cannot be used.
    """
    from checkpointless.launcher.agent.launch import launch_coordinator
    from checkpointless.launcher.coordinator.job_config import CoordinatorConfig
    from checkpointless.launcher.protocol.handshake import TOKEN_ENV

    settings = coordination_settings(options)
    try:
        config = CoordinatorConfig(
            nnodes=options.nnodes,
            nproc_per_node=options.nproc_per_node,
            rdzv_endpoint=options.rdzv_endpoint,
            token=os.environ.pop(TOKEN_ENV, ""),
            run_dir=options.run_dir,
            **settings,
        )
        return launch_coordinator(config, say)
    except ValueError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"cannot listen at {options.rdzv_endpoint}: {error.strerror or error}") from error


COMMAND = Command(
    "coordinator",
    "coordinate a job of several nodes from outside of them",
    _add_coordinator_options,
    coordinate,
    _EPILOG,
)
