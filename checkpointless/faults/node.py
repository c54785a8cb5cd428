"""Faults of a whole node, which a rank causes through the agent that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import time

from checkpointless.environment import AGENT_PID_ENV
from checkpointless.posix.signals import CUT_SIGNAL

_HANG_S = 3600.0
_NOTICED_S = 10.0  # by then the job has noticed what was done to the agent
_TURN_S = 0.02  # short, so that this thread can be interrupted


def agent_pid() -> int | None:
    """Return the process id of this node's agent in a job of several nodes, or None in any other job."""
    pid = os.environ.get(AGENT_PID_ENV)
    return None if pid is None else int(pid)


def lose(agent: int) -> None:
    """Kill the agent, and with it this process."""
    os.kill(agent, signal.SIGKILL)
    time.sleep(_HANG_S)


def cut_off(agent: int, seconds: float) -> None:
    """Stop the agent for ``seconds`` seconds, with all its connections open, as if the network were gone.

    The process that wakes the agent up again outlives this process, which may be killed meanwhile.
    """
    subprocess.Popen(
        ["/bin/sh", "-c", 'sleep "$0"; kill -CONT "$1"', f"{seconds:g}", str(agent)],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.kill(agent, signal.SIGSTOP)


def drop_coordinator(agent: int) -> None:
    """Make the agent close its connection to the coordinator, and wait for what follows."""
    os.kill(agent, CUT_SIGNAL)
    until_s = time.monotonic() + _NOTICED_S
    while time.monotonic() < until_s:
        time.sleep(_TURN_S)
