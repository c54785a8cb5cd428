"""What is replaced in `torch.cuda`: the current device is the CPU, and all work is done when a call returns."""

import contextlib
import time
from typing import Any

import torch

from checkpointless.integrations.megatron.cpu.device_stream import STREAM_FUNCTIONS, Generators
from checkpointless.integrations.megatron.cpu.placement import CPU
from checkpointless.integrations.megatron.cpu.replacements import constant, replaced_by
from checkpointless.system.patches import Patch

_TENSOR_TYPES = (
    *("FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor"),
    *("ByteTensor", "CharTensor", "ShortTensor", "IntTensor", "LongTensor", "BoolTensor"),
)


def rows() -> list[Patch]:
    """Return the replacements in `torch.cuda`."""
    cuda = torch.cuda
    table = [
        Patch(cuda, "current_device", constant(CPU), "tensors are created on `torch.cuda.current_device()`"),
        Patch(cuda, "set_device", constant(None), "there is one device"),
        Patch(cuda, "device_count", constant(1), "NeMo seeds Megatron's tracker only where a device is counted"),
        Patch(cuda, "is_available", constant(False), "torch counts devices where Lightning has it ask NVML"),
        Patch(cuda, "_is_in_bad_fork", constant(False), "in builds for CUDA, counting devices forbids forks"),
        Patch(cuda, "synchronize", constant(None), "nothing is queued"),
        Patch(cuda, "Stream", lambda _: Stream, "work is done when the call returns"),
        Patch(cuda, "Event", lambda _: Event, "as for streams; timers read it"),
        Patch(cuda, "stream", lambda _: contextlib.nullcontext, "as for streams"),
        Patch(cuda, "set_stream", constant(None), "as for streams"),
        Patch(cuda, "current_stream", lambda _: Stream, "as for streams"),
        Patch(cuda, "default_stream", lambda _: Stream, "as for streams"),
        Patch(cuda, "is_current_stream_capturing", constant(False), "Megatron asks; there are no CUDA graphs"),
        Patch(cuda, "default_generators", lambda _: Generators(), "Megatron sets the state of its element"),
    ]
    for module in (torch.cuda, torch.cuda.random):
        table += [
            Patch(module, name, replaced_by(function), "the device's stream is a generator")
            for name, function in STREAM_FUNCTIONS.items()
        ]
    why = "NeMo's fine-tuning data makes a `torch.cuda.LongTensor`"
    table += [Patch(cuda, name, replaced_by(getattr(torch, name)), why) for name in _TENSOR_TYPES]
    return table


class Stream:
    """Stand-in for a CUDA stream, on which all work is done at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def synchronize(self) -> None:
        """Return at once: nothing is queued."""

    def query(self) -> bool:
        """Return True: all work is done."""
        return True

    def wait_stream(self, stream: "Stream") -> None:
        """Return at once: nothing is queued."""

    def wait_event(self, event: "Event") -> None:
        """Return at once: nothing is queued."""

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Record `event`, or a new one, now."""
        recorded = event or Event()
        recorded.record()
        return recorded


class Event:
    """Stand-in for a CUDA event, which has happened as soon as it is recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._recorded_s = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Record the current time."""
        self._recorded_s = time.perf_counter()

    def synchronize(self) -> None:
        """Return at once: the event has happened."""

    def wait(self, stream: Stream | None = None) -> None:
        """Return at once: the event has happened."""

    def query(self) -> bool:
        """Return True: the event has happened."""
        return True

    def elapsed_time(self, end: "Event") -> float:
        """Return the milliseconds from this event to `end`, as `torch.cuda.Event` does."""
        return (end._recorded_s - self._recorded_s) * 1e3
