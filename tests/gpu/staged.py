"""Provide process groups that move the tensors of a GPU through the host, so that several ranks can share one.

They are the groups of the test device (``tests/device``): ranks meet in files, an abort waits for the other groups,
what was aborted ends like what succeeded. Here a launch first copies what it sends to the host, and the results are
copied to the GPU when they are there; whoever uses a result waits for it in one call that no interruption reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.device.device import Device
from tests.device.groups import LateNCCLGroup, LateWork

BACKEND = "staged"
device = Device()


class StagedNCCLGroup(LateNCCLGroup):
    """Represents a process group for tensors on the CPU and on a GPU."""

    def getBackendName(self) -> str:
        return BACKEND

    def _get_backend(self, device: torch.device) -> StagedNCCLGroup:
        return self

    def _launch(self, outputs: Iterable[torch.Tensor], work: Callable[[], None]) -> LateWork:
        outputs = list(outputs)
        if any(each.is_cuda for each in outputs):
            torch.cuda.current_stream().synchronize()  # what still reads them
        launched = super()._launch(outputs, work)
        launched._blocks = True  # no stream can be made to wait for the host
        return launched

    # torch's names of these before 2.13
    _allgather_base = LateNCCLGroup.all_gather_single
    _reduce_scatter_base = LateNCCLGroup.reduce_scatter_single
    allgather_into_tensor_coalesced = LateNCCLGroup.all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = LateNCCLGroup.reduce_scatter_single_coalesced
    alltoall_base = LateNCCLGroup.all_to_all_single


def install() -> None:
    """Have torch know the backend (idempotent). Where there is CUDA, the recovery sends from it, as with NCCL."""
    if BACKEND in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(BACKEND, _create, devices=["cpu", "cuda"])
    if torch.cuda.is_available():
        configured: Any = dist.get_backend_config
        module: Any = dist

        def as_nccl(group: Any = None) -> str:
            return str(configured(group)).replace(f"cuda:{BACKEND}", "cuda:nccl")

        module.get_backend_config = as_nccl


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> StagedNCCLGroup:
    return StagedNCCLGroup(device, store, rank, size)
