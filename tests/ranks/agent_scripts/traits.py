"""Note what a rank's process is like when its script begins, then make steps."""

import logging
import os
import random
import signal
import sys
import threading
from pathlib import Path

import numpy as np
from block import note, run_block

OWN = {"RANK", "CHECKPOINTLESS_INCARNATION", "CHECKPOINTLESS_AGENT_FD"}
VARYING = OWN | {"CHECKPOINTLESS_BOARD_FD", "MASTER_PORT", "JOB_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"}


def opened() -> list[str]:
    """Return what the descriptors of this process lead to, without the numbers of sockets."""
    names = []
    for name in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{name}").partition("[")[0])
        except FileNotFoundError:
            continue  # that of the folder itself
    return sorted(names)


note(
    "traits",
    nice=[os.getpriority(os.PRIO_PROCESS, int(task)) for task in os.listdir("/proc/self/task")],
    policy=os.sched_getscheduler(0),
    processors=sorted(os.sched_getaffinity(0)),
    oom=Path("/proc/self/oom_score_adj").read_text(),
    leads=(os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()),
    handlers=[str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
    blocked=len(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    wakeup=signal.set_wakeup_fd(-1),
    loggers=[type(handler).__name__ for handler in logging.getLogger().handlers],
    threads=sorted(thread.name for thread in threading.enumerate()),
    opened=opened(),
    path=sys.path,
    arguments=sys.argv,
    environment={name: value for name, value in sorted(os.environ.items()) if name not in VARYING},
)
note("drawn", numpy=float(np.random.random()), python=random.random())
run_block(int(os.environ["STEPS"]), lambda step, generation: None)
