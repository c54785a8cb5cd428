"""The vendor's agent: every call to it, each with its limit."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

from checkpointless.launcher.client.agent_client import RankUnknownError
from checkpointless.launcher.client.hyperpod.package import VendorPackage
from checkpointless.launcher.client.hyperpod.replies import Start, worker_envs

logger = logging.getLogger(__name__)

LISTEN_S = 60.0  # long, because the vendor's client drops what arrives between two calls
MAX_MESSAGE_CHARS = 1000  # shown in the job's status; also, several threads may send, so it must fit into one write


class ReportError(ConnectionError):
    """The agent did not take a report."""


class VendorAgent:
    """A connection to the vendor's agent.

    Args:
        package: the vendor's package.
        start_timeout_s: how many seconds the agent may take to start the job, or to start it again.

    Raises:
        RuntimeError: the agent cannot be reached.
    """

    def __init__(self, package: VendorPackage, start_timeout_s: float) -> None:
        self._package = package
        self._start_timeout_s = start_timeout_s
        try:
            self._vendor = package.client()
        except (OSError, ValueError, package.error) as error:
            raise RuntimeError(
                f"SageMaker HyperPod's agent cannot be reached ({error}): start the job with "
                "`hyperpodrun --inprocess-restart`"
            ) from error

    def wait_rank_info(self) -> dict[str, str]:
        """Wait until the agent says which rank this process is, without a limit, and return the environment for it.

        Raises:
            RankUnknownError: the agent is gone, or said something else.
        """
        while True:
            began_s = time.monotonic()
            try:
                return worker_envs(
                    self._vendor.hyperpod_wait_rank_info(timeout=self._start_timeout_s), "job_rank_info"
                )
            except (self._package.error, ValueError) as error:
                timed_out = time.monotonic() - began_s > self._start_timeout_s / 2
                if not timed_out or isinstance(error, ValueError):
                    raise RankUnknownError(
                        f"SageMaker HyperPod's agent did not say which rank this is ({error}): was the job started "
                        "with `hyperpodrun --inprocess-restart`?"
                    ) from error
                logger.warning("still waiting to be told which rank this is: %s", error)

    def wait_start(self, stopped: threading.Event) -> Start:
        """Report at the barrier, and wait until the agent starts the job; a spare then waits again.

        Args:
            stopped: set when a spare need not wait again.

        Raises:
            RuntimeError: no start came in time.
            ValueError: the agent said something else.
        """
        while True:
            began_s = time.monotonic()
            try:
                return Start.of(self._vendor.hyperpod_barrier(timeout=self._start_timeout_s))
            except self._package.error as error:
                timed_out = time.monotonic() - began_s > self._start_timeout_s / 2
                if os.environ.get("SPARE") == "True" and timed_out and not stopped.is_set():
                    continue
                raise RuntimeError(
                    f"no start message arrived ({error}): "
                    "was the job started with `hyperpodrun --inprocess-restart`?"
                ) from error

    def pass_barrier(self) -> None:
        """Tell the agent that this rank has heard of the start."""
        self._vendor.hyperpod_past_rcb_barrier()

    def report_fault(self, rank: int, reason: str, message: str, *, in_place: bool = True) -> None:
        """Report a fault of this rank.

        Args:
            rank: this process's rank.
            reason: one word for what went wrong.
            message: one line, of which the first :data:`MAX_MESSAGE_CHARS` characters are sent.
            in_place: whether processes may stay alive; otherwise every process of the job is replaced.

        Raises:
            ReportError: the agent did not take the report.
        """
        if len(message) > MAX_MESSAGE_CHARS:
            message = f"{message[: MAX_MESSAGE_CHARS - 4]} ..."
        mode = self._package.in_place if in_place else self._package.new_processes
        try:
            self._vendor.hyperpod_send_fault(rank, mode, reason=reason, message=message)
        except self._package.error as error:
            raise ReportError(f"could not report a fault: {error}") from error

    def notices(self, stopped: threading.Event) -> Iterator[tuple[object, Any]]:
        """Yield the kind and the body of everything that the agent says to a rank that waits for a fault.

        Args:
            stopped: set when no more is wanted.
        """
        while not stopped.is_set():
            began_s = time.monotonic()
            try:
                kind, body = self._vendor.hyperpod_wait_fault(timeout=LISTEN_S)
            except self._package.error:
                if time.monotonic() - began_s < LISTEN_S / 2:  # not a timeout: something is wrong; do not spin
                    stopped.wait(1.0)
                continue
            yield kind, body
