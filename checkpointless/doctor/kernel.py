"""The features of the kernel that an agent and its ranks use; sandboxes and old kernels lack some."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from checkpointless.doctor.findings import Family, Finding, Severity

_PR_GET_PDEATHSIG = 2


@dataclass(frozen=True)
class Feature:
    """A feature, and whether it works here.

    Attributes:
        name: its name.
        error: what the kernel says instead ("" if it works).
        without: what happens without it.
        is_needed: whether no job can run without it.
    """

    name: str
    error: str
    without: str
    is_needed: bool


def judge(features: Sequence[Feature]) -> list[Finding]:
    """Return which features are missing, and what that means."""
    release = os.uname().release
    missing = [
        Finding(
            Family.KERNEL,
            Severity.ERROR if each.is_needed else Severity.ADVICE,
            f"{each.name} does not work ({each.error}): {each.without}",
            f"Linux {release}",
            "use a kernel of 5.3 or newer, and no sandbox that forbids it",
        )
        for each in features
        if each.error
    ]
    names = ", ".join(each.name for each in features)
    return missing or [Finding(Family.KERNEL, Severity.OK, f"{names} work", f"Linux {release}")]


def read() -> list[Feature]:
    """Try each feature."""
    return [
        Feature("memfd", _tried(_memfd), "a rank has no board", True),
        Feature("PR_SET_PDEATHSIG", _tried(_parent_death), "ranks outlive a killed agent", True),
        Feature("SOCK_SEQPACKET", _tried(_messages), "no zygote can be told what to start", True),
        Feature("pidfd", _tried(_pidfd), "the end of killed processes is not waited for", False),
    ]


def _tried(attempt: Callable[[], None]) -> str:
    try:
        attempt()
    except (OSError, AttributeError) as error:  # AttributeError: Python was built without it
        return str(error) or type(error).__name__
    return ""


def _memfd() -> None:
    os.close(os.memfd_create("checkpointless-doctor", os.MFD_CLOEXEC))


def _parent_death() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_GET_PDEATHSIG, ctypes.byref(ctypes.c_int()), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl is refused")


def _messages() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.close()
    theirs.close()


def _pidfd() -> None:
    os.close(os.pidfd_open(os.getpid()))
