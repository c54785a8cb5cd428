"""Start agents in a tenth of a second: a fork server imports torch once, where each would take two seconds.

What an agent starts is started as ever: the zygote is an interpreter of its own, unless ``fork_here`` is set.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from checkpointless.launcher.agent.launch import launch
from checkpointless.launcher.agent.launch_config import LaunchConfig
from checkpointless.launcher.coordinator import job_config

_nursery = multiprocessing.get_context("forkserver")
_nursery.set_forkserver_preload(["torch._dynamo", "torch.distributed", __name__])  # these take so long


class ForkedAgent:
    """Runs an agent in a process of its own, and is handled like a ``subprocess.Popen`` with pipes and text."""

    def __init__(self, options: Mapping[str, Any], env: Mapping[str, str]) -> None:
        pipes = [_nursery.Pipe(duplex=False) for _ in range(2)]
        arguments = (dict(options), dict(env), *(ours for _, ours in pipes))
        self._process = _nursery.Process(target=_be_agent, args=arguments, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        streams = []
        for theirs, ours in pipes:
            ours.close()
            streams.append(os.fdopen(os.dup(theirs.fileno())))
            theirs.close()
        self.stdout, self.stderr = streams

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("an agent", timeout)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = 60.0) -> tuple[str, str]:
        said = ["", ""]

        def read(index: int, stream: IO[str]) -> None:
            said[index] = "" if stream.closed else stream.read()
            stream.close()

        readers = [
            threading.Thread(target=read, args=each, daemon=True) for each in enumerate((self.stdout, self.stderr))
        ]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return said[0], said[1]


def _be_agent(options: dict[str, Any], env: dict[str, str], *outputs: Connection) -> None:
    os.environ.clear()
    os.environ.update(env)
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)  # the tests may run under nohup
    tempfile.tempdir = None  # take that of the environment
    for descriptor, output in enumerate(outputs, start=1):
        os.dup2(output.fileno(), descriptor)
        output.close()
    floor_s = options.pop("floor_s", None)  # the least limit of a rank in a step
    if floor_s is not None:
        job_config.FLOOR_S = floor_s
    options["run_dir"] = Path(options["run_dir"])
    options["script_args"] = tuple(options["script_args"])
    sys.exit(launch(LaunchConfig(**options), lambda line: print(line, file=sys.stderr, flush=True)))
