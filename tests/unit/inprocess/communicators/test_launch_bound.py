"""Test that launches never find the queue full, so that the thread that handles a fault can run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from checkpointless.inprocess.communicators import launch_bound
from checkpointless.inprocess.communicators.launch_bound import LaunchBound
from checkpointless.system.environment import LAUNCH_AHEAD_ENV

ROOT = Path(__file__).parents[4]


class CountedEvent:
    open = most = 0

    def record(self) -> None:
        CountedEvent.open += 1
        CountedEvent.most = max(CountedEvent.most, CountedEvent.open)

    def synchronize(self) -> None:
        CountedEvent.open -= 1


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    CountedEvent.open = CountedEvent.most = 0
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


class Model(nn.Module):
    """A model with layers behind another one."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Linear(2, 2)
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(layers))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        given = self.embedding(given)
        for layer in self.decoder.layers:  # type: ignore[union-attr]
            given = layer(given)
        return given


@pytest.mark.parametrize(("layers", "ahead"), [(12, 4), (3, 8), (5, 1)])
def test_launches_run_no_more_layers_ahead_than_allowed(layers: int, ahead: int) -> None:
    model = Model(layers)
    assert LaunchBound(ahead, CountedEvent).watch(model) == layers
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
    assert (CountedEvent.most, CountedEvent.open) == (ahead + 1, ahead), "both directions are counted"


def test_no_wait_comes_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(6)
    LaunchBound(1, CountedEvent).watch(model)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    model(torch.ones(1, 2))
    assert CountedEvent.most == 0


@pytest.mark.parametrize(
    ("text", "has_gpu", "is_bound"),
    [(None, True, True), ("3", True, True), ("0", True, False), (None, False, False), ("3", False, False)],
)
def test_it_is_on_where_there_is_a_gpu_unless_it_is_switched_off(
    monkeypatch: pytest.MonkeyPatch, text: str | None, has_gpu: bool, is_bound: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: CountedEvent())
    if text is not None:
        monkeypatch.setenv(LAUNCH_AHEAD_ENV, text)
    assert (launch_bound.from_environment() is not None) == is_bound


_RANK = """
import sys, threading, time
import torch
from checkpointless.inprocess.communicators.launch_bound import LaunchBound
from tests.device.device import Device, Operation, event_class

torch.cuda.is_current_stream_capturing = lambda: False
device = Device(queue=64, holds_lock_s=3.0)
bound = LaunchBound(2, event_class(device)) if sys.argv[1] == "bound" else None

def handle_the_fault():
    while len(device.queued()) < 60:
        time.sleep(0.01)
    time.sleep(0.2)
    print(device.held_lock, flush=True)
    device.fail("aborted")

threading.Thread(target=handle_the_fault).start()
try:
    for layer in range(20):
        if bound is not None:
            bound.at_layer()
        for kernel in range(20):
            device.launch(Operation())  # behind a collective that a lost rank never joins
except RuntimeError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_bound", [True, pytest.param(False, marks=pytest.mark.long)])
def test_the_thread_that_handles_a_fault_runs_while_launches_wait_for_a_lost_rank(is_bound: bool) -> None:
    """Without the bound a launch finds the queue full, and holds the interpreter lock."""
    command = [sys.executable, "-c", _RANK, "bound" if is_bound else "free"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.split("\n")[:2] == [str(not is_bound), "CUDA error: aborted"]
