"""Leaves what a node finds in the run directory: ``python -m checkpointless.doctor.recorder``, beside an agent.

An agent starts it as a process of low priority, and neither waits for it nor fails with it.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from checkpointless.agent.ranks.rank_process import die_with_parent
from checkpointless.doctor.findings import Finding
from checkpointless.doctor.node import Question, examine
from checkpointless.doctor.records import NodeRecord, write
from checkpointless.doctor.versions import has_driver

logger = logging.getLogger(__name__)

_LOWEST_PRIORITY = 19
_END_S = 2.0


@contextlib.contextmanager
def recording(question: Question, node: int, spares: int) -> Iterator[None]:
    """Have a process examine this node while the job begins, and end it with the job.

    Args:
        question: what the node is examined for; it has a run directory.
        node: number of this node.
        spares: number of nodes that wait.
    """
    command = [sys.executable, "-m", "checkpointless.doctor.recorder", str(question.run_dir)]
    command += ["--parent", str(os.getpid()), "--node", str(node), "--spares", str(spares)]
    command += ["--nodes", str(question.nodes), "--ranks", str(question.ranks)]
    command += ["--cpu"] if question.cpu else []
    if question.endpoint is not None:
        command += ["--host", question.endpoint[0], "--port", str(question.endpoint[1])]
    quiet = subprocess.DEVNULL
    try:
        process = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
    except OSError as error:  # the job does not need it
        logger.warning("this node's findings are not recorded: %s", error)
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # it has a session of its own, with those that it has ask
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            logger.warning("the process %d that examines this node does not end, not even killed", process.pid)


def main(arguments: Sequence[str] | None = None) -> None:
    """Examine this node and write the record.

    Args:
        arguments: command-line arguments (default: those of this process).
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--node", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--spares", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    options = parser.parse_args(arguments)
    die_with_parent(options.parent)
    os.nice(_LOWEST_PRIORITY)
    question = Question(
        ranks=options.ranks,
        nodes=options.nodes,
        endpoint=(options.host, options.port) if options.host else None,
        run_dir=options.run_dir,
        cpu=options.cpu,
        ask_torch=has_driver() and not options.cpu,  # elsewhere there is no NCCL to ask for
    )
    found = examine(question, lambda line: None)
    findings: tuple[Finding, ...] = found.findings
    host, at_s = socket.gethostname(), time.time()
    record = NodeRecord(
        options.node, options.nodes, options.spares, host, at_s, found.clock, dict(found.facts), findings
    )
    write(record, options.run_dir)


if __name__ == "__main__":
    main()
