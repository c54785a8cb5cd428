"""Provide what ranks do with NCCL itself, each function in processes of its own (``tests.gpu.isolated``)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from checkpointless.inprocess import RankShouldRestart
from checkpointless.inprocess.communicators.process_groups import _nccl_backends, process_groups
from checkpointless.recovery.guard import vote
from checkpointless.system.environment import JOB_RESTART_COUNT_ENV, MASTER_PORT_ENV
from tests.gpu.spin import Spin

#: From this version on several ranks may share a GPU, if they are told so.
SHARED_SINCE = (2, 30, 3)
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
_LIMIT = timedelta(seconds=600)
_PATIENCE_S = 3.0


def _begin(groups: int = 0) -> list[Any]:
    """Make the world and further groups of all its ranks, and use each once."""
    torch.cuda.set_device(0)
    process_groups.install()
    dist.init_process_group("nccl", timeout=_LIMIT)
    made: list[Any] = [dist.group.WORLD, *(dist.new_group(timeout=_LIMIT) for _ in range(groups))]
    for group in made:
        dist.all_reduce(torch.ones(1, device="cuda"), group=group)
    torch.cuda.synchronize()
    return made


def _abort(backends: Iterable[Any], at_once: bool) -> None:
    if at_once:
        process_groups.abort()
    else:
        for backend in backends:
            backend.abort()


def _restart() -> None:
    process_groups.hold()
    process_groups.destroy()
    process_groups.release()
    process_groups.reap()


def aborts(count: int, at_once: bool, stall_s: float) -> dict[str, Any]:
    """Return how long it takes to abort the communicators of one rank."""
    spin = Spin()
    _begin(count)
    backends = _nccl_backends()
    if stall_s:
        spin.start(stall_s)
    began_s = time.monotonic()
    _abort(backends, at_once)
    aborted_s = time.monotonic() - began_s
    spin.release()
    torch.cuda.synchronize()
    return {"communicators": len(backends), "aborted_s": aborted_s}


def generations(ports: list[str]) -> list[float]:
    """Return the sum over all ranks in each of several generations of one process, after an abort each."""
    sums = []
    for generation in range(len(ports)):
        os.environ[JOB_RESTART_COUNT_ENV] = str(generation)
        os.environ[MASTER_PORT_ENV] = ports[generation]
        _begin(2)
        tensor = torch.full((4,), 1.0 + generation, device="cuda")
        dist.all_reduce(tensor)
        vote()
        sums.append(float(tensor[0].item()))
        dist.barrier()
        process_groups.abort()
        _restart()
    return sums


def lost_peer(at_once: bool) -> dict[str, Any]:
    """Rank 1 does not come to the collectives of three groups; rank 0 aborts (C2), and then votes (M1)."""
    groups = _begin(2)
    if dist.get_rank() == 1:
        time.sleep(20.0)
        return {}
    tensors = [torch.ones(1 << 20, device="cuda") for _ in groups]
    streams = [torch.cuda.Stream() for _ in groups]
    for group, tensor, stream in zip(groups, tensors, streams, strict=True):
        with torch.cuda.stream(stream):
            dist.all_reduce(tensor, group=group)
    time.sleep(1.0)
    backends = _nccl_backends()
    found: dict[str, Any] = {"is stuck": not all(stream.query() for stream in streams)}
    began_s = time.monotonic()
    thread = threading.Thread(target=_abort, args=(backends, at_once), daemon=True)
    thread.start()
    thread.join(15.0)
    found["aborted"] = not thread.is_alive()
    found["aborted_s"] = time.monotonic() - began_s
    if found["aborted"]:
        torch.cuda.synchronize()
        found["device_s"] = time.monotonic() - began_s
    return found


def _begun(wait: Callable[[], object]) -> tuple[threading.Thread, list[str]]:
    """Begin a call in a thread, and return after a while the thread, and what becomes of the call."""
    outcome: list[str] = []

    def call() -> None:
        torch.cuda.set_device(0)
        try:
            wait()
            torch.cuda.synchronize()
            outcome.append("returned")
        except (RuntimeError, RankShouldRestart) as error:
            outcome.append(type(error).__name__)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    return thread, outcome


def voting() -> dict[str, Any]:
    """Rank 1 does not vote and comes to no barrier; rank 0 is aborted in both (M1)."""
    groups = _begin(1)
    if dist.get_rank() == 1:
        time.sleep(20.0)
        return {}
    found: dict[str, Any] = {}
    for name, wait in (("barrier", lambda: dist.barrier(groups[1])), ("vote", vote)):
        thread, outcome = _begun(wait)
        found[f"{name} waits"] = thread.is_alive()
        if name == "barrier":
            groups[1].abort()
        else:
            process_groups.abort()
        thread.join(10.0)
        found[name] = outcome
    return found


def making() -> dict[str, Any]:
    """Rank 1 never comes to where a communicator is made; rank 0 is aborted there (C4)."""
    _begin()
    group: Any = dist.new_group(timeout=_LIMIT)
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(20.0)
        return {}
    thread, outcome = _begun(lambda: dist.all_reduce(torch.ones(1, device="cuda"), group=group))
    waits = thread.is_alive()
    began_s = time.monotonic()
    process_groups.abort()
    thread.join(15.0)
    return {
        "waits": waits,
        "is free": not thread.is_alive(),
        "freed_s": time.monotonic() - began_s,
        "outcome": outcome,
    }
