"""Run a node's part of a job, or a coordinator in a process of its own, with signals, events and HTTP around it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from checkpointless.launcher.agent.launch_config import CoordinatorConfig, LaunchConfig, limits_of, meeting_of
from checkpointless.launcher.agent.rank_program import RankProgram
from checkpointless.launcher.agent.ranks.output import Output
from checkpointless.observability.telemetry.events import EVENTS_FILE, EventLog
from checkpointless.observability.telemetry.log_relay import LogRelay
from checkpointless.observability.telemetry.scribe import scribe
from checkpointless.system.shared_memory import FOLDER as SHARED_MEMORY
from checkpointless.system.signals import CUT_SIGNAL, ENDING, PASSED_ON, handling
from checkpointless.system.temp_folder import private_folder, private_temp_folder

if TYPE_CHECKING:  # only if HTTP is asked for
    from checkpointless.launcher.agent.watch import Watch
    from checkpointless.observability.monitoring.http_status import HttpStatus

_NO_HANDOVER = "a process that has to be replaced cannot hand its state to its successor"


def launch_coordinator(config: CoordinatorConfig, say: Callable[[str], None]) -> int:
    """Coordinate a job until it is over.

    It handles signals, so it must be called in the main thread.

    Args:
        say: called with each line for the terminal.

    Returns:
        0 if every rank ended successfully, else 1.

    Raises:
        OSError: the endpoint cannot be listened on, or the run directory cannot be created.
        ValueError: HTTP cannot be served at the configured address.
    """
    from checkpointless.launcher.agent.watch import Watch
    from checkpointless.launcher.coordinator.hosting import coordinate
    from checkpointless.observability.monitoring.snapshot import OUTSIDE, JobNames

    if config.run_dir is not None:
        config.run_dir.mkdir(parents=True, exist_ok=True)
    events_path = config.run_dir / EVENTS_FILE if config.run_dir is not None else None
    meeting, limits = meeting_of(config), limits_of(config)
    signals: list[int] = []
    if config.http_port is None:
        with handling(ENDING, signals.append), LogRelay(), closing(scribe):
            return coordinate(meeting, limits, EventLog(events_path, node=OUTSIDE), say, signals)
    from checkpointless.observability.monitoring.http_status import HttpStatus

    watch = Watch(OUTSIDE, JobNames(run_dir="" if config.run_dir is None else str(config.run_dir)))
    http = HttpStatus(config.http_host, config.http_port, watch)
    with handling(ENDING, signals.append), http, LogRelay(), closing(scribe):
        try:
            http.open(say)
        except OSError as error:
            raise ValueError(str(error)) from error  # not an OSError: the endpoint is not to blame
        return coordinate(meeting, limits, watch.log(events_path), say, signals, watch.look_from_outside)


def launch(config: LaunchConfig, say: Callable[[str], None]) -> int:
    """Run this node's part of the job until it ends.

    It handles signals, so it must be called in the main thread. The ranks' output goes to
    ``<run dir>/logs/rank-N.log`` and, except on a spare, also to stdout with the rank in front of each line. When
    this returns, no process, socket or file is left but the run directory.

    Args:
        say: called with each line for the terminal: incidents, and why a job failed.

    Returns:
        0 if every rank ended successfully, else 1. torchrun (2.13) also returns 1 for a rank that fails with any
        code or signal, and for a signal that ends the agent. The ranks get the same signal, and
        ``config.term_grace_s`` to end; a second Ctrl-C kills them at once.

    Raises:
        OSError: the run directory cannot be created or written to, or the endpoint cannot be listened on.
    """
    config.logs.mkdir(parents=True, exist_ok=True)
    events_path = config.run_dir / EVENTS_FILE
    signals: list[int] = []
    handled = (*ENDING, *PASSED_ON, *((CUT_SIGNAL,) if config.faults and not config.is_alone else ()))
    if config.http_port is None:
        with handling(handled, signals.append), private_temp_folder() as folder, LogRelay(), closing(scribe):
            return _run(config, folder, EventLog(events_path, node=config.node_rank), signals, say)
    from checkpointless.launcher.agent.watch import Watch
    from checkpointless.observability.monitoring.http_status import HttpStatus
    from checkpointless.observability.monitoring.snapshot import JobNames

    names = JobNames(config.job or Path(config.script).stem, str(config.run_dir), config.script)
    watch = Watch(config.node_rank, names)
    http = HttpStatus(config.http_host, config.http_port, watch)
    with handling(handled, signals.append), private_temp_folder() as folder, http, LogRelay(), closing(scribe):
        return _run(config, folder, watch.log(events_path), signals, say, http, watch)


def _run(
    config: LaunchConfig,
    folder: Path | None,
    events: EventLog,
    signals: list[int],
    say: Callable[[str], None],
    http: HttpStatus | None = None,
    watch: Watch | None = None,
) -> int:
    output = Output(
        config.logs,
        None if config.is_alone else config.node_rank,
        config.log_bytes,
        new_logs=config.own_ranks,
        terminal=_standard_output(),
        shown=config.shown_ranks,
        say=say,
    )
    with private_folder(lambda: SHARED_MEMORY, _NO_HANDOVER) as handover:
        program = RankProgram(config, folder, handover)
        starter = program.zygote(output)
        # This loads torch, which takes seconds; the zygote does so at the same time.
        from checkpointless.launcher.agent.node_run import NodeRun

        run = NodeRun(
            config, program, starter, output, events=events, signals=signals, say=say, http=http, watch=watch
        )
        return run.run()


def _standard_output() -> int | None:
    """Return the descriptor of standard output; None if it has none, as in a notebook, or was closed."""
    try:
        return None if sys.stdout is None else sys.stdout.fileno()
    except OSError:
        return None
