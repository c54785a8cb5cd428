"""Play the test device in this process: torch's groups run on it, and `torch.cuda` waits for it."""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import checkpointless.faults.inject
from tests.device.communicator import THREAD
from tests.device.device import Device, Memory, event_class, graph_class
from tests.device.groups import BACKEND, LateNCCLGroup

device = Device()
memory = Memory()
_CHOICE = "_get_default_process_group_backend_for_device"


class Waits(TorchDispatchMode):
    """Makes every operation on tensors wait for what is queued and writes them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not device.is_idle or device.error is not None:
            device.wait_for(each for each in tree_iter((args, kwargs)) if isinstance(each, torch.Tensor))
        found = func(*args, **kwargs)
        for each in tree_iter(found):
            if isinstance(each, torch.Tensor):
                memory.count(each)
        return found


def install() -> None:
    """Play it in this thread, and in every other that starts from now on."""
    for module in list(sys.modules.values()):  # Lightning's has it, and so has each that imported it
        if _CHOICE in vars(module):
            setattr(module, _CHOICE, lambda device: BACKEND)
    dist.Backend.register_backend(BACKEND, lambda *given: LateNCCLGroup(device, *given[:3]), devices=["cpu"])
    cuda: Any = torch.cuda
    cuda.is_initialized = lambda: True
    cuda.device_count = lambda: 8
    cuda.synchronize = lambda *_: device.synchronize()
    cuda.Event = event_class(device)
    cuda.CUDAGraph = graph_class(device)
    cuda.reset_peak_memory_stats = lambda *_: memory.reset_peak()
    cuda.memory_allocated = cuda.memory_reserved = lambda *_: memory.held
    cuda.max_memory_allocated = lambda *_: memory.most
    for name in ("numpy", "tolist", "__repr__"):  # these read memory without an operation
        setattr(torch.Tensor, name, _after_waiting(getattr(torch.Tensor, name)))
    faults: Any = checkpointless.faults.inject
    faults._has_cuda, faults._fail_device_assert = lambda: True, _fail
    dist.is_nccl_available = lambda: True
    torch.cuda.nccl.version = lambda: (2, 27, 3)
    any_thread: Any = threading.Thread
    run = any_thread.run

    def run_and_wait(thread: threading.Thread) -> None:
        if thread.name == THREAD:
            run(thread)
            return
        with Waits():
            run(thread)

    any_thread.run = run_and_wait
    Waits().__enter__()


def _fail() -> None:
    """Fail as in a kernel, and notice it where the device is waited for."""
    device.fail("device-side assert triggered")
    device.synchronize()


def _after_waiting(method: Any) -> Any:
    @functools.wraps(method)
    def waits(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        device.wait_for([tensor])
        return method(tensor, *args, **kwargs)

    return waits
