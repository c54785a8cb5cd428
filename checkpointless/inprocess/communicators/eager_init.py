"""Make NCCL's communicators when the groups are made, and those of subgroups by splitting the first one.

Without it, each of the about twenty communicators of a Megatron job has a bootstrap of its own, at its first
collective. With it, only the first one has: the others come from ``ncclCommSplit``, which exchanges less and knows
the topology already. torch does so wherever ``init_process_group`` is given a ``device_id``
(https://docs.pytorch.org/docs/stable/distributed.html). It is off unless ``CHECKPOINTLESS_EAGER_INIT=1``: a split
is a collective of all ranks of the first communicator, also of those that are not in the subgroup.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from checkpointless.environment import EAGER_INIT_ENV, YES
from checkpointless.patches import Patch, Patches

_FUNCTION = "init_process_group"
_WHY = "NeMo and Lightning give it no device"


class EagerInit:
    """Replacement for ``torch.distributed.init_process_group`` that gives it the device of this process."""

    def __init__(self) -> None:
        self._patches = Patches()

    def install(self) -> None:
        """Replace torch's function if the user asks for it and this build of torch has NCCL (idempotent)."""
        asked = os.environ.get(EAGER_INIT_ENV) == YES and dist.is_nccl_available()
        if asked and not self._patches.are_made:
            self._patches.make([Patch(module, _FUNCTION, _with_device, _WHY) for module in (c10d, dist)])

    def uninstall(self) -> None:
        """Restore torch's function."""
        self._patches.undo()


def _with_device(original: Callable[..., None]) -> Callable[..., None]:
    """Return torch's function, given the current device where it makes groups of NCCL's."""

    @functools.wraps(original)
    def init(backend: str | None = None, *args: Any, device_id: Any = None, **options: Any) -> None:
        of_nccl = backend is None or "nccl" in str(backend).lower()
        if device_id is None and of_nccl and torch.cuda.is_available():
            device_id = torch.device("cuda", torch.cuda.current_device())
        original(backend, *args, device_id=device_id, **options)

    return init
