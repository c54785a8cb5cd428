"""Provide what the tests of one process do to a GPU, each in a process of its own (``tests.gpu.isolated``)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from checkpointless import HPCallWrapper, HPWrapper
from checkpointless.inprocess import CudaHealthCheck, HPState
from checkpointless.inprocess.finalize import collect_garbage
from checkpointless.inprocess.health_check import bounded, wait_for_device
from checkpointless.inprocess.parameter_update_lock import CommitState
from checkpointless.recovery.manager import _Refill
from checkpointless.replication.host_memory import HostMemoryPool
from checkpointless.state.held_state import HeldState
from checkpointless.state.module_tensors import TrainingTensors
from checkpointless.state.rng import RngStates
from checkpointless.state.serialization.digest import MemoryChecksumManager, _digest_on_device
from checkpointless.state.serialization.tensor_memory import tensor_bytes
from tests.gpu.spin import Spin

STATE = HPState(rank=0, world_size=1, local_rank=0, generation=0)
_BUDGET = 128 << 20
_TRACKED = "model-parallel-rng"  # Megatron's name of its stream for tensor parallelism
_TICK_S = 0.005


# ---- a device that stalls


def health(bound_s: float) -> dict[str, Any]:
    """Return what the health check says, and when, while the device is stalled; it passes before and after."""
    spin, check = Spin(), CudaHealthCheck(timeout=bound_s)
    check(STATE)
    spin.start(10 * bound_s)
    began_s = time.monotonic()
    said = ""
    try:
        check(STATE)
    except TimeoutError as error:
        said = str(error)
    took_s = time.monotonic() - began_s
    spin.release()
    torch.cuda.synchronize()
    check(STATE)
    return {"said": said, "took_s": took_s}


def block(bound_s: float, stall_s: float) -> None:
    """Leave a block by an exception while the device is stalled: this process must be replaced."""
    spin = Spin()

    @HPWrapper(abort_timeout=bound_s)
    def stalled(caller: HPCallWrapper) -> None:
        spin.start(stall_s)
        raise RuntimeError("a fault, with the device stalled")

    stalled()


def waits(what: str, bound_s: float, stall_s: float) -> dict[str, float]:
    """Return how a part of a restart bears a stalled device that nobody frees: how long it took, after how long its
    limit was noticed (-1: never), and the longest time for which no other thread could run.
    """
    spin = Spin()
    tensors = {("tensor",): torch.ones(1 << 20, device="cuda")}
    digests = MemoryChecksumManager(enabled=True)
    digests.digest_all(tensors)
    parts: dict[str, Callable[[], object]] = {
        "synchronize": wait_for_device,
        "digest": lambda: digests.digest_all(tensors),
        "garbage": collect_garbage,
        "item": tensors["tensor",][0].item,
    }
    cached = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    del cached
    noticed: list[float] = []
    pulse = Pulse()
    spin.start(stall_s)
    began_s = time.monotonic()
    with pulse, bounded(what, bound_s, lambda why: noticed.append(time.monotonic() - began_s)):
        parts[what]()
        took_s = time.monotonic() - began_s
    return {"took_s": took_s, "noticed_s": (noticed or [-1.0])[0], "longest_gap_s": pulse.longest_s}


class Pulse:
    """Measures in a thread for how long the interpreter lock was held by others."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._thread.join()

    def _beat(self) -> None:
        last_s = time.monotonic()
        while not self._over.wait(_TICK_S):
            now_s = time.monotonic()
            self.longest_s = max(self.longest_s, now_s - last_s)
            last_s = now_s
        self.longest_s = max(self.longest_s, time.monotonic() - last_s)


# ---- random streams


def streams(graphable: bool) -> dict[str, list[float]]:
    """Return what is drawn after a moment, and again after the moment was put back, here and in a fresh tracker."""
    from megatron.core.tensor_parallel import random as megatron

    from checkpointless.integrations.megatron import cleanup

    cleanup.install()
    make = {"use_cudagraphable_rng": graphable, "force_reset": True}

    def begin(seed: int) -> None:
        megatron.initialize_rng_tracker(**make)
        megatron.get_cuda_rng_tracker().add(_TRACKED, seed)

    def draw() -> list[float]:
        with megatron.get_cuda_rng_tracker().fork(_TRACKED):
            tracked = torch.rand(4, device="cuda")
        return [*tracked.tolist(), *torch.rand(2, device="cuda").tolist(), *torch.rand(2).tolist()]

    begin(1)
    draw()
    kept = RngStates.capture().to_bytes()
    found = {"after": draw(), "later": draw()}
    RngStates.from_bytes(kept).restore()
    found["put back"] = draw()
    begin(2)
    draw()
    RngStates.from_bytes(kept).restore()
    found["in a fresh tracker"] = draw()
    return found


# ---- memory


def digests() -> list[bool]:
    """Return for sizes and dtypes whether a digest on the GPU is that of the same algorithm on the host."""
    made = torch.Generator().manual_seed(1)
    same = []
    for count in (0, 1, 7, 8, 1023, (32 << 20) + 5, 100_000_001):
        raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=made)
        same.append(bool(_digest_on_device(raw.cuda()) == _digest_on_device(raw)))
    for dtype in (torch.bfloat16, torch.float32, torch.int64):
        tensor = torch.randn(1000, 333, generator=made).mul(100).to(dtype)
        same.append(bool(_digest_on_device(tensor_bytes(tensor.cuda())) == _digest_on_device(tensor_bytes(tensor))))
    return same


class Alone(TrainingTensors):
    """The tensors of a rank that shares them with nobody."""

    def replica_groups(self, keys: Any) -> Any:
        return {(0,): list(keys)}


def training(width: int, layers: int, device: str = "cuda") -> tuple[nn.Module, Alone]:
    """Return a model in bf16 and its tensors, with an optimizer that has made no step."""
    made: dict[str, Any] = {"bias": False, "device": device, "dtype": torch.bfloat16}
    model = nn.Sequential(*(nn.Linear(width, width, **made) for _ in range(layers)))
    return model, Alone([model], [torch.optim.AdamW(model.parameters(), lr=1e-3)])


def stepped(width: int, layers: int, device: str = "cuda") -> tuple[nn.Module, Alone]:
    """Return a model and its tensors after one step, without gradients."""
    model, state = training(width, layers, device)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    (optimizer,) = state._torch_optimizers
    assert optimizer is not None
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model, state


def alone() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def reentry(width: int, layers: int, device: str = "cuda") -> dict[str, Any]:
    """Return what putting a held state into a fresh model costs, and whether it is whole and adopted."""
    alone()
    model, state = stepped(width, layers, device)
    checksums = MemoryChecksumManager()
    expected, held = checksums.digest_all(state.tensors()), state.tensors()
    moments = {key: tensor.data_ptr() for key, tensor in held.items() if str(key[-1]).startswith("exp_avg")}
    nbytes = sum(tensor.nbytes for tensor in held.values())
    del model, state
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else nbytes
    began_s = time.monotonic()
    model, state = training(width, layers, device)
    _, report = _Refill().move(state, {}, held, {}, memory_budget_bytes=_BUDGET)
    del held
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.monotonic() - began_s
    there = state.tensors()
    return {
        "is_whole": checksums.digest_all(there) == expected,
        "are_adopted": all(there[key].data_ptr() == place for key, place in moments.items()) and bool(moments),
        "bytes": nbytes,
        "kept": report.kept,
        "seconds": seconds,
        "peak": torch.cuda.max_memory_allocated() / before if on_gpu else 0.0,
        "left": torch.cuda.memory_allocated() / before if on_gpu else 1.0,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def offload(width: int, layers: int) -> dict[str, Any]:
    """Return how long it takes to move a held state to pinned memory again, and whether it is whole there."""
    _, state = stepped(width, layers)
    began_s = time.monotonic()
    pool = HostMemoryPool()
    HeldState(CommitState(1, ready=False, torn=False), state.tensors(), {}).offload(pool)
    first_s = time.monotonic() - began_s
    held = HeldState(CommitState(2, ready=False, torn=False), state.tensors(), {})
    expected = [tensor.cpu() for tensor in held.tensors.values()]
    nbytes = sum(tensor.nbytes for tensor in held.tensors.values() if tensor.is_cuda)
    torch.cuda.synchronize()
    began_s = time.monotonic()
    held.offload(pool)
    seconds = time.monotonic() - began_s
    found = list(held.tensors.values())
    return {
        "is_whole": all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)),
        "first_s": first_s,
        "is_pinned": all(each.is_pinned() for each in found if each.numel() > 1),
        "bytes": nbytes,
        "seconds": seconds,
    }
