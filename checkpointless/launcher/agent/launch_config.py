"""What a node's agent is asked to do, checked before anything starts, and variables that it gives its ranks."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from checkpointless.launcher.coordinator.job_config import JobConfig
from checkpointless.system.environment import CPU_ENV, OMP_NUM_THREADS_ENV, PYTORCH_NVML_BASED_CUDA_CHECK_ENV, YES

DEFAULT_TERM_GRACE_S = 30.0  # torchrun's
SIGTERM_ENDS, SIGTERM_DRAINS = "end", "drain"  # what SIGTERM does to an agent


def _words(text: str, what: str) -> tuple[str, ...]:
    """Divide a command line as a shell does; raise ``ValueError`` if there is no such program."""
    try:
        command = tuple(shlex.split(text))
        if not command or shutil.which(command[0]) is None:
            raise ValueError("there is no such program")
    except ValueError as error:
        raise ValueError(f"the {what} {text!r} cannot be run: {error}") from error
    return command


@dataclass(frozen=True, kw_only=True)
class LaunchConfig(JobConfig):
    """What to run on a node, and how; ``ValueError`` if values do not go together, or if there is nothing to run.

    Attributes:
        preload: dotted names to import once before the ranks are forked; None: what the script imports from
            installed distributions.
        fork_here: whether to fork the ranks' zygote from this process, which has imported what they need; only in
            a process with one thread and no CUDA context.
        local_ranks_filter: the ranks of the node, from 0, whose output is copied to stdout (None: all).
        log_dir: directory of the logs; None: ``logs`` in ``run_dir``.
        log_bytes: size of the log of each rank, with the older files that it was divided into.
        node_rank: this node's number, from 0; the number of a spare is ``nnodes`` or more.
        term_grace_s: how long the ranks have to end once the job has to end, or has failed.
        exit_grace_s: how long a rank's process may be idle once its script, or else its block, has ended.
        device_check: command whose exit code 0 says that a rank's device may be used again ("": none).
        on_sigterm: ``end`` the job, or ``drain`` the node, whose ranks a spare takes over; a second one ends it.
        notice: command that is run every few seconds, and whose exit code 0 drains the node, too ("": none).
        job: name of the job, for its metrics (default: that of the script).
    """

    script: str
    run_dir: Path
    script_args: tuple[str, ...] = ()
    module: bool = False
    preload: tuple[str, ...] | None = None
    cpu: bool = False
    faults: tuple[str, ...] = ()
    strict: bool = False
    record_steps: bool = False
    stream_logs: bool = True
    local_ranks_filter: tuple[int, ...] | None = None
    log_dir: Path | None = None
    log_bytes: int = 1 << 30
    fork_here: bool = False
    extra_env: Mapping[str, str] = field(default_factory=dict)
    node_rank: int = 0
    spares: int = 0
    term_grace_s: float = DEFAULT_TERM_GRACE_S
    exit_grace_s: float = 30.0
    device_check: str = ""
    device_check_timeout_s: float = 30.0
    on_sigterm: str = SIGTERM_ENDS
    notice: str = ""
    job: str = ""

    @property
    def is_alone(self) -> bool:
        """Whether this is the job's only node."""
        return self.nnodes + self.spares == 1

    @property
    def shown_ranks(self) -> list[int]:
        """The ranks of this node whose output is copied to stdout."""
        first, chosen = self.node_rank * self.nproc_per_node, self.local_ranks_filter
        return [rank for rank in self.own_ranks if self.stream_logs and (chosen is None or rank - first in chosen)]

    @property
    def logs(self) -> Path:
        return self.log_dir or self.run_dir / "logs"

    @cached_property
    def check_command(self) -> tuple[str, ...]:
        """The words of ``device_check``, whose program was there; none without one."""
        return _words(self.device_check, "device check") if self.device_check else ()

    @property
    def notice_command(self) -> tuple[str, ...]:
        """The words of ``notice``; none without one."""
        return _words(self.notice, "notice command") if self.notice else ()

    @property
    def own_ranks(self) -> range:
        """The ranks that this node runs from the beginning; a spare runs none."""
        first = self.node_rank * self.nproc_per_node
        return range(first, first + self.nproc_per_node) if self.node_rank < self.nnodes else range(0)

    def __post_init__(self) -> None:
        if not 0 <= self.node_rank < self.nnodes + self.spares:
            last = self.nnodes + self.spares - 1
            raise ValueError(f"the node rank must be from 0 to {last} (spares included), not {self.node_rank}")
        if any(rank >= self.nproc_per_node for rank in self.local_ranks_filter or ()):
            raise ValueError(f"the local ranks to show must be from 0 to {self.nproc_per_node - 1}")
        if not self.is_alone:
            self.check_meeting()
        limit_s, regroup_s = self.device_check_timeout_s, self.regroup_timeout_s
        if self.check_command and limit_s >= regroup_s:
            said = f"{limit_s:g} s must be less than --regroup-timeout, {regroup_s:g} s"
            raise ValueError(f"--device-check-timeout, {said}")
        moves = self.notice_command or self.on_sigterm != SIGTERM_ENDS or self.move_stragglers
        if moves and self.is_alone:
            what = "--on-sigterm drain, --notice and --move-stragglers"
            raise ValueError(f"{what} need several nodes, one of them a spare (--spares)")
        if self.module:
            if not _module_exists(self.script):
                raise ValueError(f"there is no module {self.script!r}")
        elif not Path(self.script).is_file():
            raise ValueError(f"there is no script {self.script!r}")


def _module_exists(name: str) -> bool:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def import_environment(nproc_per_node: int, cpu: bool) -> dict[str, str]:
    """Return the environment variables of every rank that decide what imports do."""
    env = {}
    if nproc_per_node > 1 and OMP_NUM_THREADS_ENV not in os.environ:
        env[OMP_NUM_THREADS_ENV] = "1"
    if cpu:
        env[CPU_ENV] = YES
    elif PYTORCH_NVML_BASED_CUDA_CHECK_ENV not in os.environ:
        # Imports ask whether there is a GPU; the answer must not initialise CUDA, or the zygote could not fork.
        env[PYTORCH_NVML_BASED_CUDA_CHECK_ENV] = YES
    return env
