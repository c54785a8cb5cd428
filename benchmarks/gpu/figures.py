"""What is measured on one GPU, each function in a process of its own. Started by run.py."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from checkpointless.recovery.guard import vote
from checkpointless.state.serialization.digest import _digest_on_device
from checkpointless.transfer.tensor_entry import Key
from checkpointless.transfer.transfer import Fill, receive_state, send_state
from tests.gpu import single
from tests.gpu.single import Pulse
from tests.gpu.spin import Spin

BYTES_OF_PARAMETER = 8  # in bf16: the parameter, two moments and, during a step, the gradient
_BLOCKED_S = 0.2
_MOST_LAUNCHES = 20_000


def figure(
    name: str, unit: str, values: list[float], against: str = "", reference: list[float] | None = None
) -> dict[str, Any]:
    """Return a figure as JSON; see tests.gpu.results.Figure."""
    return {"name": name, "unit": unit, "values": values, "against": against, "reference": reference or []}


def _seconds(work: Callable[[], object], times: int, warm: int = 2) -> list[float]:
    """How long ``work`` takes each time, the device's part included."""
    taken = []
    for number in range(-warm, times):
        _finish()
        began_s = time.perf_counter()
        work()
        _finish()
        if number >= 0:
            taken.append(time.perf_counter() - began_s)
    return taken


def _finish() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def vote_cost(times: int) -> list[dict[str, Any]]:
    """The vote of one rank over NCCL, against a step of a small model."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    layers = [torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(12)]
    given = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        value = given
        for layer in layers:
            value = torch.nn.functional.gelu(value @ layer)

    steps = _seconds(step, times)
    against = "12 products of 4096 x 4096 in bf16"
    return [figure("vote, one rank", "ms", _ms(_seconds(vote, times)), against, _ms(steps))]


def launches(times: int, stall_s: float) -> list[dict[str, Any]]:
    """How many launches a stalled device takes before one blocks, and for how long no other thread can run then."""
    spin = Spin()
    tensor = torch.zeros(1024, device="cuda")
    ways: dict[str, Callable[[], object]] = {
        "torch's add_": lambda: tensor.add_(1),
        "torch's matmul": lambda: tensor.view(32, 32) @ tensor.view(32, 32),
        "a binding that releases the lock": lambda: spin.launch(0.0),
        "a binding that holds the lock": lambda: spin.launch(0.0, holding=True),
    }
    found = []
    for name, launch in ways.items():
        depths, gaps, blocked = [], [], []
        launch()
        for _ in range(times):
            _finish()
            spin.start(stall_s)
            pulse, longest_s, depth = Pulse(), 0.0, 0
            with pulse:
                while longest_s < _BLOCKED_S and depth < _MOST_LAUNCHES:
                    began_s = time.perf_counter()
                    launch()
                    longest_s = max(longest_s, time.perf_counter() - began_s)
                    depth += 1
            spin.release()
            _finish()
            depths.append(float(depth))
            blocked.append(longest_s)
            gaps.append(pulse.longest_s)
        found.append(figure(f"{name}: launches until one blocks", "launches", depths))
        found.append(figure(f"{name}: no other thread runs", "s", gaps, "the launch that blocks", blocked))
    return found


def digest(mib: int, times: int, device: str) -> list[dict[str, Any]]:
    """The digest, against a copy of the same bytes on the device."""
    raw = torch.randint(0, 256, (mib << 20,), dtype=torch.uint8, device=device)
    target = torch.empty_like(raw)
    copies = _rates(raw.nbytes, _seconds(lambda: target.copy_(raw), times))
    digests = _rates(raw.nbytes, _seconds(lambda: _digest_on_device(raw).item(), times))
    against = "copy on the device"
    return [
        figure(f"digest_on_device, {device}, {mib} MiB", "GB/s", digests, against, copies),
    ]


def contexts(times: int) -> list[dict[str, Any]]:
    """From a fork to a ready context, against a fresh interpreter; torch asks NVML whether there is a GPU."""
    if not torch.cuda.is_available() or torch.cuda.is_initialized():
        raise RuntimeError("torch has set up CUDA, so that nothing can be forked")
    forked, fresh = [], []
    for _ in range(times):
        began_s = time.perf_counter()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                torch.zeros(1, device="cuda").add_(1).item()
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        if status != 0:
            raise RuntimeError("a forked process could not use CUDA")
        forked.append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        program = "import torch; torch.zeros(1, device='cuda').add_(1).item()"
        subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
        fresh.append(time.perf_counter() - began_s)
    return [figure("fork, context, end", "s", forked, "a new interpreter with torch", fresh)]


def reentry(parameters: int, times: int, device: str) -> list[dict[str, Any]]:
    """Putting a held state into a fresh model: seconds against a copy of as many bytes, and memory at its peak."""
    width = 4096 if device == "cuda" else 512
    if device == "cuda":
        parameters = min(parameters, torch.cuda.get_device_properties(0).total_memory // (4 * BYTES_OF_PARAMETER))
    layers = max(1, parameters // width**2)
    runs = [single.reentry(width, layers, device) for _ in range(times)]
    if not all(run["is_whole"] and run["are_adopted"] for run in runs):
        raise RuntimeError(f"the state was not put back: {runs}")
    raw = torch.empty(runs[0]["bytes"], dtype=torch.uint8, device=device)
    target = torch.empty_like(raw)
    copies = _seconds(lambda: target.copy_(raw), times)
    name = f"re-entry of {runs[0]['parameters'] / 1e6:.0f} million parameters, {device}"
    found = [figure(name, "s", [run["seconds"] for run in runs], "copy of as many bytes", copies)]
    if device == "cuda":
        found.append(figure(f"{name}: peak", "of the held state", [run["peak"] for run in runs]))
    return found


def offload(parameters: int, times: int) -> list[dict[str, Any]]:
    """Moving a held state to pinned memory that is new, against a copy to pinned memory that is there."""
    width = 4096
    runs = [single.offload(width, max(1, parameters // width**2)) for _ in range(times)]
    if not all(run["is_whole"] for run in runs):
        raise RuntimeError(f"the state was not moved: {runs}")
    raw = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    host = torch.empty_like(raw, device="cpu", pin_memory=True)
    copies = _rates(raw.nbytes, _seconds(lambda: host.copy_(raw, non_blocking=True), times))
    rates = [run["bytes"] / run["seconds"] / 1e9 for run in runs]
    return [figure("offload", "GB/s", rates, "copy to pinned memory that is there", copies)]


def transfer(mib: int, times: int, device: str) -> list[dict[str, Any]]:
    """Filling one process from another over gloo, against a raw send of as many bytes on the host."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tensors: dict[Key, torch.Tensor] = {
        ("model", 0, str(index)): torch.full((4 << 20,), float(index + rank), device=device)
        for index in range(max(1, mib // 16))
    }
    nbytes = sum(each.nbytes for each in tensors.values())
    raw = torch.ones(nbytes, dtype=torch.uint8)

    def fill() -> None:
        if rank == 1:
            send_state(tensors, {}, [Fill(0, 0, 1)])
        else:
            receive_state((1,), lambda entries: tensors)

    def send() -> None:
        if rank == 1:
            dist.send(raw, 0)
        else:
            dist.recv(raw, 1)

    filled: list[float] = []
    sent: list[float] = []
    for _ in range(times):
        for work, taken in ((fill, filled), (send, sent)):
            dist.barrier()
            taken.extend(_seconds(work, 1, warm=0))
    if rank != 0:
        return []
    for index, tensor in enumerate(tensors.values()):
        if float(tensor[0].item()) != index + 1:
            raise RuntimeError("what arrived is not what was sent")
    name = f"transfer between two processes, {device}, {mib} MiB"
    return [figure(name, "GB/s", _rates(nbytes, filled), "gloo, raw, on the host", _rates(nbytes, sent))]


def _ms(seconds: list[float]) -> list[float]:
    return [1000 * each for each in seconds]


def _rates(nbytes: int, seconds: list[float]) -> list[float]:
    return [nbytes / each / 1e9 for each in seconds]
