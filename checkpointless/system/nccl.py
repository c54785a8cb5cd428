"""The variables by which torch and NCCL leave a lost rank's peers alive, and which NCCL is recent enough."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from checkpointless.system.environment import (
    NCCL_NVLS_ENABLE_ENV,
    NCCL_RAS_ENABLE_ENV,
    TORCH_DIST_USE_NCCL2_ENV,
    TORCH_NCCL_ASYNC_ERROR_HANDLING_ENV,
    TORCH_NCCL_DUMP_ON_TIMEOUT_ENV,
    TORCH_NCCL_ENABLE_MONITORING_ENV,
    TORCH_NCCL_RETHROW_CUDA_ERRORS_ENV,
    TORCH_NCCL_USE_COMM_NONBLOCKING_ENV,
    TORCHELASTIC_RUN_ID_ENV,
)

#: Earlier versions may deadlock while several communicators of a process are aborted
#: (https://github.com/pytorch/pytorch/issues/149153).
_OLDEST_NCCL = (2, 26, 2)
_OFF, _ON = "0", "1"
_OF_TORCHRUN = "1"  # torchrun gives this to every rank whose user has not set it

LIBRARY = "libnccl.so.2"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Setting:
    value: str
    otherwise: str


SETTINGS: Mapping[str, _Setting] = {
    TORCH_NCCL_ASYNC_ERROR_HANDLING_ENV: _Setting(
        _OFF, "torch ends a healthy rank that sees the connection to a lost peer break"
    ),
    TORCH_NCCL_RETHROW_CUDA_ERRORS_ENV: _Setting(
        _OFF, "torch's watchdog ends a rank for errors of an aborted group"
    ),
    TORCH_NCCL_ENABLE_MONITORING_ENV: _Setting(_OFF, "torch ends a rank whose watchdog is held up by an abort"),
    TORCH_NCCL_DUMP_ON_TIMEOUT_ENV: _Setting(_OFF, "a timeout of one rank ends the others"),
    TORCH_NCCL_USE_COMM_NONBLOCKING_ENV: _Setting(
        _ON, "no abort knows of a communicator that is being made, and a rank may wait in it until it is replaced"
    ),
    TORCH_DIST_USE_NCCL2_ENV: _Setting(
        _OFF,
        "from torch 2.15 on, nccl then means ProcessGroupNCCL2, with which no recovery has been tried; it does not "
        "read TORCH_NCCL_RETHROW_CUDA_ERRORS",
    ),
    NCCL_RAS_ENABLE_ENV: _Setting(
        _OFF, "after a fault while a communicator was made, NCCL's RAS thread may keep a core busy"
    ),
    NCCL_NVLS_ENABLE_ENV: _Setting(_OFF, "multicast over NVLink cannot be set up again after an abort"),
}


def in_force() -> tuple[int, ...]:
    """Return the loaded NCCL's version (empty: none); ``LD_PRELOAD`` may replace that of torch's build."""
    for name in (None, LIBRARY):
        version = ctypes.c_int()
        try:
            ctypes.CDLL(name).ncclGetVersion(ctypes.byref(version))
        except (OSError, AttributeError):
            continue
        return version.value // 10000, version.value // 100 % 100, version.value % 100
    return ()


def problem_of_version(version: tuple[int, ...]) -> str | None:
    """Return what is wrong with a version of NCCL, in one line, or None."""
    if version >= _OLDEST_NCCL:
        return None
    found, least = (".".join(map(str, each)) for each in (version, _OLDEST_NCCL))
    return f"NCCL {found}: aborting several communicators may deadlock; install a torch with NCCL {least} or newer"


def apply(environ: MutableMapping[str, str]) -> tuple[str, ...]:
    """Set the variables that the user has not set; warn of, and return, those that have another value."""
    others = []
    for name, setting in SETTINGS.items():
        if name not in environ or is_torchruns(name, environ):
            environ[name] = setting.value
        elif environ[name] != setting.value:
            others.append(name)
            logger.warning("%s=%s is kept: %s", name, environ[name], setting.otherwise)
    return tuple(others)


def is_torchruns(name: str, environ: Mapping[str, str]) -> bool:
    """Return whether the launcher, and probably nobody else, has set the variable."""
    return (
        name == TORCH_NCCL_ASYNC_ERROR_HANDLING_ENV
        and environ[name] == _OF_TORCHRUN
        and TORCHELASTIC_RUN_ID_ENV in environ
    )
