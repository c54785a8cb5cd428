"""Check that this process is still fit to train, after clean-up and before it rejoins the other ranks.

A time limit for code that runs in this process and may hang.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch

from checkpointless.inprocess.communicators.helper_thread import run_in_helper_thread
from checkpointless.inprocess.generation import HPState
from checkpointless.system.environment import LOCAL_RANK_ENV


def time_limit(name: str, given: float | timedelta) -> timedelta:
    """Return a positive limit, in seconds or as a ``timedelta``, as one."""
    limit = given if isinstance(given, timedelta) else timedelta(seconds=given)
    if limit <= timedelta():
        raise ValueError(f"{name} must be a positive number of seconds, not {given}")
    return limit


@contextmanager
def bounded(what: str, limit_s: float, too_late: Callable[[str], object]) -> Iterator[None]:
    """Bracket code that must end within ``limit_s`` seconds; else a thread calls ``too_late`` with the reason."""
    timer = threading.Timer(limit_s, too_late, [f"{what} did not end within {limit_s:g} s"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class HealthCheck(ABC):
    """A check that raises if this process must not be used again; the agent then replaces the process."""

    @abstractmethod
    def __call__(
        self, state: HPState, train_ex: BaseException | None = None
    ) -> tuple[HPState, BaseException | None]:
        """Check this process, at a place in the job, after ``train_ex`` ended the block; return both arguments,
        unchanged.
        """


def wait_for_device() -> None:
    """Wait for the current GPU, if CUDA was used; ``RuntimeError`` if it reported an error."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class CudaHealthCheck(HealthCheck):
    """Synchronizes with the GPU, within a time limit, to verify that its context is not corrupted.

    The check uses the device of ``LOCAL_RANK``, or the current device if ``LOCAL_RANK`` is not set or this process
    sees no such device. It passes if CUDA was not used.

    Args:
        timeout: time limit for the synchronization, as a ``timedelta`` or in seconds.

    Raises:
        ValueError: ``timeout`` is not positive.
    """

    def __init__(self, timeout: float | timedelta = timedelta(seconds=30)) -> None:
        self.timeout = time_limit("timeout", timeout)

    def __call__(
        self, state: HPState, train_ex: BaseException | None = None
    ) -> tuple[HPState, BaseException | None]:
        """Check this process's device; raise ``TimeoutError`` if it does not answer, ``RuntimeError`` if CUDA
        reports an error.
        """
        if not torch.cuda.is_initialized():
            return state, train_ex
        local_rank = int(os.environ.get(LOCAL_RANK_ENV) or -1)
        seen = 0 <= local_rank < torch.cuda.device_count()
        device = torch.device("cuda", local_rank if seen else torch.cuda.current_device())
        limit_s = self.timeout.total_seconds()
        try:
            run_in_helper_thread(lambda: torch.cuda.synchronize(device), limit_s)
        except TimeoutError:
            raise TimeoutError(f"{device} did not synchronize within {limit_s:.0f} s") from None
        except Exception as error:
            raise RuntimeError(f"{device} is not healthy: {error}") from error
        return state, train_ex
