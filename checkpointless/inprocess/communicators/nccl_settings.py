"""Tells torch and NCCL through the environment what keeps the loss of one rank from ending its peers.

torch reads its variables when it makes a group, NCCL when it is initialised. Set before the block is entered, they
count under every launcher. :mod:`checkpointless.nccl` has the variables and their values.
"""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping

import torch
import torch.distributed as dist

from checkpointless.environment import TORCH_DIST_USE_NCCL2_ENV, own_rank
from checkpointless.nccl import SETTINGS, is_torchruns, problem_of_version

_NCCL2_SINCE = (2, 15)  # where nothing is said, nccl means ProcessGroupNCCL2
logger = logging.getLogger(__name__)


def apply(environ: MutableMapping[str, str] | None = None) -> tuple[str, ...]:
    """Set every variable that the user has not set, and warn of those that were set otherwise.

    Args:
        environ: the environment to change (None: this process's).

    Returns:
        The names of the variables that the user has set otherwise.
    """
    environ = os.environ if environ is None else environ
    others = []
    for name, setting in SETTINGS.items():
        if name not in environ or is_torchruns(name, environ):
            environ[name] = setting.value
        elif environ[name] != setting.value:
            others.append(name)
            logger.warning("%s=%s is kept: %s", name, environ[name], setting.otherwise)
    return tuple(others)


def apply_where_there_is_nccl() -> None:
    """Call :func:`apply` for this process and look at the version of NCCL, unless this build of torch has none."""
    if not dist.is_nccl_available():
        return
    is_ours = TORCH_DIST_USE_NCCL2_ENV not in os.environ
    apply()
    if is_ours and own_rank() == 0 and tuple(map(int, torch.__version__.split(".")[:2])) >= _NCCL2_SINCE:
        logger.info("nccl means torch's former ProcessGroupNCCL in this job (%s=0)", TORCH_DIST_USE_NCCL2_ENV)
    problem = problem_of_version(torch.cuda.nccl.version())
    if problem is not None:
        logger.warning("%s", problem)
