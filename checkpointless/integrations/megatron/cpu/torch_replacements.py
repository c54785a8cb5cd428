"""What the CPU platform replaces in torch."""

import contextlib
import functools
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

from checkpointless.system.patches import Patch, Patches

_T = TypeVar("_T")

#: The replacements of this process.
replacements = Patches()


def constant(value: _T) -> Callable[[object], Callable[..., _T]]:
    """Return a `Patch.make` whose replacement returns `value`, whatever it is called with."""
    return lambda _: lambda *args, **kwargs: value


def replaced_by(replacement: _T) -> Callable[[object], _T]:
    """Return a `Patch.make` whose replacement is `replacement`."""
    return lambda _: replacement


def itself(self: _T, *args: Any, **kwargs: Any) -> _T:
    """Return the object whose method this is, as a move does that has nothing to do."""
    return self


# --- The device's stream of random numbers: one generator, on which the functions of `torch.cuda` act -------------


#: The stream.
stream = torch.Generator()
#: Whether the caller is in `CudaRNGStatesTracker.fork()`, where all draws are the tracker's.
inside_fork: ContextVar[bool] = ContextVar("checkpointless_cpu_platform_inside_fork", default=False)


class Generators:
    """Stand-in for `torch.cuda.default_generators`, which has the one device's stream at every index."""

    def __getitem__(self, device: object) -> torch.Generator:
        return stream

    def __len__(self) -> int:
        return 1


def _manual_seed(seed: int) -> None:
    stream.manual_seed(int(seed))


def _seed() -> None:
    stream.seed()


def _initial_seed() -> int:
    return stream.initial_seed()


def _get_stream_state(device: object = "cuda") -> torch.Tensor:
    return stream.get_state()


def _get_stream_states() -> list[torch.Tensor]:
    return [stream.get_state()]


def set_stream_state(new_state: torch.Tensor, device: object = "cuda", graph_safe: bool = False) -> None:
    """Set the stream's state, as `torch.cuda.set_rng_state` and Megatron's tracker do."""
    stream.set_state(new_state)


def stream_bytes() -> bytes:
    """Return the stream's state as bytes, which are cheaper to store than a tensor."""
    return stream.get_state().numpy().tobytes()


def set_stream_bytes(state: bytes) -> None:
    """Set the stream's state to what `stream_bytes()` returned."""
    stream.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _set_stream_states(new_states: list[torch.Tensor]) -> None:
    for state in new_states:
        stream.set_state(state)


#: Functions of `torch.cuda` and `torch.cuda.random`, by name.
STREAM_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "manual_seed": _manual_seed,
    "manual_seed_all": _manual_seed,
    "seed": _seed,
    "seed_all": _seed,
    "initial_seed": _initial_seed,
    "get_rng_state": _get_stream_state,
    "get_rng_state_all": _get_stream_states,
    "set_rng_state": set_stream_state,
    "set_rng_state_all": _set_stream_states,
}


# --- tensors and modules: what asks for a CUDA device is placed on the CPU ----------------------------------------


CPU = torch.device("cpu")

_FACTORIES = (
    *("tensor", "as_tensor", "scalar_tensor", "empty", "zeros", "ones", "full", "eye", "arange", "linspace"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "empty_strided"),
)
_NEW_TENSOR_METHODS = ("new_tensor", "new_empty", "new_zeros", "new_ones", "new_full")


def placement_rows() -> list[Patch]:
    """Return the replacements in torch of what creates or moves tensors or modules, or returns a tensor's type."""
    table = [
        Patch(torch.Tensor, "cuda", lambda _: itself, "a tensor is already where it should be"),
        Patch(torch.Tensor, "pin_memory", lambda _: itself, "pinning needs a CUDA driver"),
        Patch(torch.nn.Module, "cuda", lambda _: itself, "a module is already where it should be"),
        Patch(torch.Tensor, "to", moved, "moves to `cuda` stay where they are"),
        Patch(torch.Tensor, "type", _typed, "Megatron's optimizers compare with 'torch.cuda.FloatTensor'"),
    ]
    why = "`device='cuda'` means the CPU"
    table += [Patch(torch, name, _placed, why) for name in _FACTORIES]
    table += [Patch(torch.Tensor, name, _placed, why) for name in _NEW_TENSOR_METHODS]
    return table


def is_cuda(device: object) -> bool:
    """Return whether an argument, of whatever type, is a CUDA device."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":", 1)[0] == "cuda"


def _placed(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if replacements.are_made:
            kwargs.pop("pin_memory", None)
            if is_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
        return original(*args, **kwargs)

    return factory


def moved(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method like `original` in which a CUDA device means the CPU, wherever it stands in the arguments."""

    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if replacements.are_made:
            args = tuple(CPU if is_cuda(arg) else arg for arg in args)
            if is_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
        return original(self, *args, **kwargs)

    return to


def _typed(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not replacements.are_made:
            return original(self, dtype, *args, **kwargs)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        result = original(self, dtype, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.") if isinstance(result, str) else result

    return type_


# --- draws: which of them use the device's stream -----------------------------------------------------------------


DRAWS = (
    *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson"),
    *("rand_like", "randn_like", "randint_like"),
)
DRAW_METHODS = (
    *("normal_", "uniform_", "bernoulli_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_"),
    *("bernoulli", "multinomial"),
)


def draw_rows() -> list[Patch]:
    """Return the replacements in torch of what draws random numbers."""
    dropout = Patch(torch.nn.functional, "dropout", _device_dropout, "dropout draws from the device's stream")
    why = "draws in a tracker's fork are the tracker's"
    table = [dropout, *(Patch(torch, name, _drawn, why) for name in DRAWS)]
    table += [Patch(torch.Tensor, name, _drawn, why) for name in DRAW_METHODS]
    return table


def _drawn(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def draw(*args: Any, **kwargs: Any) -> Any:
        if replacements.are_made:
            kwargs.pop("pin_memory", None)
            on_device = is_cuda(kwargs.get("device"))
            if on_device:
                kwargs["device"] = CPU
            if (on_device or inside_fork.get()) and kwargs.get("generator") is None:
                kwargs["generator"] = stream
        return original(*args, **kwargs)

    return draw


def _device_dropout(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if not (replacements.are_made and training and 0.0 < p < 1.0 and input.numel()):
            return original(input, p, training, inplace)
        # This is the arithmetic of ATen's native dropout, which takes no generator.
        noise = torch.empty_like(input).bernoulli_(1.0 - p, generator=stream).div_(1.0 - p)
        return input.mul_(noise) if inplace else input * noise

    return dropout


# --- `torch.cuda`: the current device is the CPU, and all work is done when a call returns ------------------------


_TENSOR_TYPES = (
    *("FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor"),
    *("ByteTensor", "CharTensor", "ShortTensor", "IntTensor", "LongTensor", "BoolTensor"),
)


def cuda_rows() -> list[Patch]:
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
