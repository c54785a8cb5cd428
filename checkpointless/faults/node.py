"""Faults of a whole node: what a rank can do to the agent that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import time

AGENT_PID_ENV = "CHECKPOINTLESS_AGENT_PID"
CUT_SIGNAL = signal.SIGUSR1  # has an agent drop its connection to the coordinator; only where faults are asked for
_HANG_S = 3600.0
_NOTICED_S = 10.0  # by then what was done to the agent has been noticed
_TURN_S = 0.02  # so that this thread can be interrupted


def agent_pid() -> int | None:
    """The agent of this rank's node, in a job of several."""
    pid = os.environ.get(AGENT_PID_ENV)
    return None if pid is None else int(pid)


def lose(agent: int) -> None:
    """Kill the agent, and with it this process."""
    os.kill(agent, signal.SIGKILL)
    time.sleep(_HANG_S)


def cut_off(agent: int, seconds: float) -> None:
    """Have the agent hear and say nothing for a while, with all its connections open, as if the network were gone.

    Who wakes it up again outlives this process, which may be killed meanwhile.
    """
    subprocess.Popen(
        ["/bin/sh", "-c", 'sleep "$0"; kill -CONT "$1"', f"{seconds:g}", str(agent)],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.kill(agent, signal.SIGSTOP)


def drop_coordinator(agent: int) -> None:
    """Have the agent close its connection to the coordinator, and wait for what follows."""
    os.kill(agent, CUT_SIGNAL)
    until_s = time.monotonic() + _NOTICED_S
    while time.monotonic() < until_s:
        time.sleep(_TURN_S)
