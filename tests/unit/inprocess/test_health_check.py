"""Test, with a stand-in for CUDA, which device is checked and what is said of one that does not answer."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from checkpointless.inprocess import CudaHealthCheck, HPState
from checkpointless.inprocess.health_check import wait_for_device

STATE = HPState(rank=0, world_size=1, local_rank=0, generation=0)


class Cuda:
    """Stands in for CUDA with a number of devices, of which the second is the current one.

    Args:
        monkeypatch: replaces torch's functions.
        devices: how many this process sees.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, devices: int) -> None:
        self.asked: list[torch.device | None] = []
        self.work: Callable[[], object] = lambda: None
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: min(1, devices - 1))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)

    def synchronize(self, device: torch.device | None = None) -> None:
        """Note the device and do the work."""
        self.asked.append(device)
        self.work()


@pytest.mark.parametrize(
    ("devices", "local_rank", "checked"),
    [(8, "5", "cuda:5"), (8, None, "cuda:1"), (1, "5", "cuda:0"), (8, "", "cuda:1")],
    ids=["its own of several", "no launcher", "the only one that it sees", "an empty variable"],
)
def test_the_device_of_this_rank_is_checked(
    devices: int, local_rank: str | None, checked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = Cuda(monkeypatch, devices)
    monkeypatch.setenv("LOCAL_RANK", local_rank or "")
    if local_rank is None:
        monkeypatch.delenv("LOCAL_RANK")
    CudaHealthCheck()(STATE)
    assert cuda.asked == [torch.device(checked)]


def test_a_device_that_does_not_answer_fails_the_check_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, never = Cuda(monkeypatch, 8), threading.Event()
    cuda.work = never.wait
    try:
        with pytest.raises(TimeoutError, match="did not synchronize within 0 s"):
            CudaHealthCheck(0.05)(STATE)
    finally:
        never.set()


def test_an_error_that_sticks_to_the_device_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch, 8)

    def fail() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    cuda.work = fail
    with pytest.raises(RuntimeError, match=r"is not healthy: .*device-side assert"):
        CudaHealthCheck()(STATE)
    with pytest.raises(RuntimeError, match="device-side assert"):
        wait_for_device()


def test_a_process_that_has_not_used_cuda_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch, 8)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    CudaHealthCheck()(STATE)
    wait_for_device()
    assert cuda.asked == []
