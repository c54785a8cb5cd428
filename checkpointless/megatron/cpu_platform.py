"""CPU as a real platform: Megatron-core and NeMo train on CPU over gloo, unchanged.

Megatron-core calls `torch.cuda` directly. `install()` replaces what it calls there, and the factories and methods
that place a tensor, so that "the current CUDA device" is the CPU. Each replacement is one row of one table, and
`uninstall()` restores the very object that was there before. `torch.cuda.is_available()` stays False: every caller
gets the truth, and Lightning picks its CPU accelerator and gloo.

Random numbers. A GPU has a separate generator beside the CPU's, and Megatron relies on that: its tracker swaps the
state of the *CUDA* generator, so that dropout and initialisation inside `tracker.fork()` draw from the tracked
stream, and it expects the CPU generator to be left alone. Here every tensor is a CPU tensor, so torch alone would
draw everything from the CPU's default generator, and two streams that are separate on a GPU would be entangled: a
data loader that draws a seed would change the dropout masks, and tensor-parallel ranks would get equal weights.

The platform therefore has a device stream: one `torch.Generator`, on which `torch.cuda.manual_seed`,
`get_rng_state`, `set_rng_state`, `default_generators` and, through them, Megatron's tracker act. A draw uses it

* always for `dropout`, and for factories that are asked for a CUDA device (`torch.rand(..., device="cuda")`);
* inside `CudaRNGStatesTracker.fork()`, for every random function in `_DRAWS` and every method in `_DRAW_METHODS`;

and the CPU's default generator otherwise. The platform directs a draw by passing the generator to it; no state is
swapped into the default generator. A swap would let `torch.get_rng_state()` inside a fork read the wrong stream
(activation recomputation under sequence parallelism does just that), would let another thread draw from it, and
could be left half done by an exception that arrives asynchronously. One case cannot be told apart: an in-place draw
outside a fork on what would have been a CUDA tensor. It uses the CPU's generator, which is as deterministic and as
much part of the state to be recovered, but is not the stream that a GPU would have used.
"""

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._device

from checkpointless.recovery.rng import RngSource, register_rng_source

ENV_CPU = "CHECKPOINTLESS_CPU"

_CPU = torch.device("cpu")
_MEGATRON_RANDOM = "megatron.core.tensor_parallel.random"
_MEGATRON_MOE = "megatron.core.transformer.moe.moe_utils"
_MEGATRON_CHECKPOINT = "megatron.core.dist_checkpointing.mapping"
_MEGATRON_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
_MEGATRON_TIMERS = "megatron.core.timers"
_GET_STATES, _SET_STATES = "_get_main_param_and_optimizer_states", "_set_main_param_and_optimizer_states"
_NEMO_CHECKPOINT_IO = "nemo.lightning.io.pl"
_NEMO_LORA = "nemo.collections.llm.peft.lora"
_NEMO_PEFT_UTILS = "nemo.collections.llm.peft.utils"
_ABSENT = object()

_FACTORIES = (
    *("tensor", "as_tensor", "scalar_tensor", "empty", "zeros", "ones", "full", "eye", "arange", "linspace"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "empty_strided"),
)
_TENSOR_TYPES = (
    *("FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor"),
    *("ByteTensor", "CharTensor", "ShortTensor", "IntTensor", "LongTensor", "BoolTensor"),
)
_NEW_TENSOR_METHODS = ("new_tensor", "new_empty", "new_zeros", "new_ones", "new_full")
_DRAWS = (
    *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson"),
    *("rand_like", "randn_like", "randint_like"),
)
_DRAW_METHODS = (
    *("normal_", "uniform_", "bernoulli_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_"),
    *("bernoulli", "multinomial"),
)


@dataclass(frozen=True)
class Patch:
    """One row of the table: `target.attribute` becomes `make(its current value, or None)`."""

    target: Any
    attribute: str
    make: Callable[[Any], Any]
    why: str


@dataclass(frozen=True)
class _Undo:
    target: Any
    attribute: str
    original: Any
    """What stood in the target's own `__dict__`, or `_ABSENT` where the attribute was inherited or missing."""


_applied: list[_Undo] = []
_stream = torch.Generator()
_inside_fork: ContextVar[bool] = ContextVar("checkpointless_cpu_platform_inside_fork", default=False)


def requested() -> bool:
    """Return whether the environment asks for the platform (`CHECKPOINTLESS_CPU=1`)."""
    return os.environ.get(ENV_CPU, "") == "1"


def installed() -> bool:
    """Return whether the platform is installed."""
    return bool(_applied)


def install() -> None:
    """Install the platform, or, if it is installed already, forget a fork that was interrupted.

    Imports parts of Megatron-core if it is installed (a few seconds, once per process or per zygote), because the
    tracker is part of the platform. NeMo is not imported; a call after NeMo has been imported adds what NeMo
    needs to load a checkpoint and for LoRA.

    Raises:
        RuntimeError: CUDA is available or in use in this process.
    """
    _inside_fork.set(False)
    if installed():
        _apply(_nemo_rows())
        return
    if torch.cuda.is_available() or torch.cuda.is_initialized():
        raise RuntimeError(
            "the CPU platform stands in for CUDA and this process has CUDA: leave out --cpu "
            f"(unset {ENV_CPU}), or hide the devices with CUDA_VISIBLE_DEVICES=''"
        )
    # `with torch.device(...)` keeps a cached set of the real factories: fill it before they are replaced.
    torch.utils._device._device_constructors()
    patches = [*_table(), *_nemo_rows()]
    _stream.manual_seed(torch.initial_seed() % 2**63)
    _apply(patches)
    register_rng_source("cpu_platform", RngSource(_stream_bytes, _set_stream_bytes))


def _apply(patches: list[Patch]) -> None:
    try:
        for patch in patches:
            own = vars(patch.target).get(patch.attribute, _ABSENT)
            replacement = patch.make(getattr(patch.target, patch.attribute, None))
            _applied.append(_Undo(patch.target, patch.attribute, own))
            setattr(patch.target, patch.attribute, replacement)
    except BaseException:
        uninstall()
        raise


def uninstall() -> None:
    """Restore exactly what `install()` replaced; do nothing if the platform is not installed."""
    while _applied:
        undo = _applied.pop()
        if undo.original is _ABSENT:
            delattr(undo.target, undo.attribute)
        else:
            setattr(undo.target, undo.attribute, undo.original)


def _table() -> list[Patch]:
    """Return every replacement that `install()` makes."""
    cuda, functional = torch.cuda, torch.nn.functional
    rows = [
        Patch(cuda, "current_device", _constant(_CPU), "tensors are created on `torch.cuda.current_device()`"),
        Patch(cuda, "set_device", _constant(None), "there is one device"),
        Patch(cuda, "device_count", _constant(1), "NeMo seeds Megatron's tracker only where a device is counted"),
        Patch(cuda, "synchronize", _constant(None), "nothing is queued"),
        Patch(cuda, "Stream", lambda _: Stream, "work is done when the call returns"),
        Patch(cuda, "Event", lambda _: Event, "as for streams; timers read it"),
        Patch(cuda, "stream", lambda _: contextlib.nullcontext, "as for streams"),
        Patch(cuda, "set_stream", _constant(None), "as for streams"),
        Patch(cuda, "current_stream", lambda _: Stream, "as for streams"),
        Patch(cuda, "default_stream", lambda _: Stream, "as for streams"),
        Patch(cuda, "is_current_stream_capturing", _constant(False), "Megatron asks; there are no CUDA graphs"),
        Patch(cuda, "default_generators", lambda _: _Generators(), "Megatron sets the state of its element"),
        Patch(torch.Tensor, "cuda", lambda _: _itself, "a tensor is already where it should be"),
        Patch(torch.Tensor, "pin_memory", lambda _: _itself, "pinning needs a CUDA driver"),
        Patch(torch.nn.Module, "cuda", lambda _: _itself, "a module is already where it should be"),
        Patch(torch.Tensor, "to", _moved, "moves to `cuda` stay where they are"),
        Patch(torch.Tensor, "type", _typed, "Megatron's optimizers compare with 'torch.cuda.FloatTensor'"),
        Patch(functional, "dropout", _device_dropout, "dropout draws from the device's stream"),
    ]
    for module in (torch.cuda, torch.cuda.random):
        rows += [
            Patch(module, name, functools.partial(_replaced_by, function), "the device's stream is a generator")
            for name, function in _STREAM_FUNCTIONS.items()
        ]
    why = "NeMo's fine-tuning data makes a `torch.cuda.LongTensor`"
    rows += [
        Patch(cuda, name, functools.partial(_replaced_by, getattr(torch, name)), why) for name in _TENSOR_TYPES
    ]
    rows += [Patch(torch, name, _placed, "`device='cuda'` means the CPU") for name in _FACTORIES]
    rows += [Patch(torch.Tensor, name, _placed, "`device='cuda'` means the CPU") for name in _NEW_TENSOR_METHODS]
    rows += [Patch(torch, name, _drawn, "draws in a tracker's fork are the tracker's") for name in _DRAWS]
    rows += [
        Patch(torch.Tensor, name, _drawn, "draws in a tracker's fork are the tracker's") for name in _DRAW_METHODS
    ]
    if _is_importable(_MEGATRON_RANDOM):
        tracker = importlib.import_module(_MEGATRON_RANDOM)
        rows += [
            Patch(tracker, "_set_cuda_rng_state", lambda _: _set_stream_state, "it is queued until CUDA starts"),
            Patch(tracker.CudaRNGStatesTracker, "fork", _forked, "marks where draws are the tracker's"),
        ]
        timers = importlib.import_module(_MEGATRON_TIMERS).Timers
        why = "NeMo's progress printer calls it on rank 0 alone; gloo counts a collective of no elements, too"
        rows.append(Patch(timers, "_get_elapsed_time_all_ranks", _if_there_are_names, why))
        moe = importlib.import_module(_MEGATRON_MOE)
        if not hasattr(moe, "te_general_gemm"):
            why = "Megatron's router asks whether it is None, and defines it only beside TransformerEngine"
            rows.append(Patch(moe, "te_general_gemm", _constant(None)(None), why))
        sharded_tensor = importlib.import_module(_MEGATRON_CHECKPOINT).ShardedTensor
        rows.append(Patch(sharded_tensor, "init_data", _moved, "its default is the real `torch.empty`"))
        optimizer = importlib.import_module(_MEGATRON_OPTIMIZER)
        if not optimizer.HAVE_APEX_OR_TE:
            distributed = optimizer.DistributedOptimizer
            # These rows serve checkpoints of torch's own Adam, whose state has a `step`.
            rows += [
                Patch(distributed, "state_dict", _with_state, "it asks for the step, before the first one too"),
                Patch(
                    distributed, "load_state_dict", _with_own_steps, "one step tensor is shared by all parameters"
                ),
                Patch(distributed, _GET_STATES, _without_step, "the step is taken for a shard of a parameter"),
                Patch(distributed, _SET_STATES, _keeping_step, "as for the other direction"),
            ]
    return rows


def _nemo_rows() -> list[Patch]:
    """Return the replacements that are still to be made in NeMo.

    Modules that were not imported are skipped, because importing NeMo takes ten seconds.
    """
    rows: list[Patch] = []
    checkpoint_io = sys.modules.get(_NEMO_CHECKPOINT_IO)
    if checkpoint_io is not None:
        why = "it wants CUDA to be initialized, to move what was loaded to the current device"
        rows.append(Patch(checkpoint_io, "_fix_tensors_device", lambda _: _itself, why))
    lora = sys.modules.get(_NEMO_LORA)
    if lora is not None and not getattr(lora, "HAVE_TE", True):
        why = "it asks of every layer whether it is TransformerEngine's, which raises where that is not installed"
        rows.append(Patch(lora, "te", lambda _: _NoTransformerEngine, why))
        why = "it takes Megatron's names of TransformerEngine's layers for the layers, where they are None"
        rows.append(Patch(sys.modules[_NEMO_PEFT_UTILS], "HAVE_TE", lambda _: False, why))
    return [row for row in rows if not any(undo.target is row.target for undo in _applied)]


def _is_importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _constant(value: Any) -> Callable[[Any], Callable[..., Any]]:
    return lambda _: lambda *args, **kwargs: value


def _replaced_by(replacement: Any, _original: Any) -> Any:
    return replacement


def _if_there_are_names(gather: Any) -> Any:
    def elapsed_time_all_ranks(timers: Any, names: Any, reset: bool, barrier: bool) -> torch.Tensor:
        if not names:
            return torch.zeros((torch.distributed.get_world_size(), 0))
        return gather(timers, names, reset, barrier)

    return elapsed_time_all_ranks


class _NoTransformerEngine:
    """Stand-in for `transformer_engine.pytorch`, of whose layers no instance exists."""

    Linear = type("Linear", (), {})


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


# --- where tensors are -----------------------------------------------------------------------------------------
# A replacement may outlive `uninstall()` in a module that imported it by name; it then acts as the original.


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":", 1)[0] == "cuda"


def _itself(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self


def _placed(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if _applied:
            kwargs.pop("pin_memory", None)
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = _CPU
        return original(*args, **kwargs)

    return factory


def _moved(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if _applied:
            args = tuple(_CPU if _is_cuda(arg) else arg for arg in args)
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = _CPU
        return original(self, *args, **kwargs)

    return to


def _typed(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not _applied:
            return original(self, dtype, *args, **kwargs)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        result = original(self, dtype, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.") if isinstance(result, str) else result

    return type_


# --- what is written to checkpoints and read from them ------------------------------------------------------------


def _with_state(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def state_dict(self: Any) -> Any:
        if _applied and self.optimizer is not None and not self.optimizer.state:
            # Adam creates this state when it takes its first step.
            self.init_state_fn(self.optimizer, self.config)
            for state in self.optimizer.state.values():
                state["step"] = torch.tensor(0.0)
        return original(self)

    return state_dict


def _with_own_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> Any:
        result = original(self, state_dict)
        if _applied and self.optimizer is not None:
            for state in self.optimizer.state.values():  # Adam increments each in place
                state["step"] = state["step"].clone()
        return result

    return load_state_dict


def _without_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_states(self: Any, model_param: Any) -> Any:
        states = original(self, model_param)
        return {key: state for key, state in states.items() if key != "step"} if _applied else states

    return get_states


def _keeping_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        if _applied:
            group, position = self.model_param_group_index_map[model_param]
            main_param = self.optimizer.param_groups[group]["params"][position]
            tensors = {**tensors, "step": self.optimizer.state[main_param]["step"]}
        with torch.no_grad():  # in fp32 a main parameter is a view of the model's parameter
            original(self, model_param, tensors)

    return set_states


# --- where random numbers come from ----------------------------------------------------------------------------


def _drawn(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def draw(*args: Any, **kwargs: Any) -> Any:
        if _applied:
            kwargs.pop("pin_memory", None)
            on_device = _is_cuda(kwargs.get("device"))
            if on_device:
                kwargs["device"] = _CPU
            if (on_device or _inside_fork.get()) and kwargs.get("generator") is None:
                kwargs["generator"] = _stream
        return original(*args, **kwargs)

    return draw


def _device_dropout(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if not (_applied and training and 0.0 < p < 1.0 and input.numel()):
            return original(input, p, training, inplace)
        # This is the arithmetic of ATen's native dropout, which takes no generator.
        noise = torch.empty_like(input).bernoulli_(1.0 - p, generator=_stream).div_(1.0 - p)
        return input.mul_(noise) if inplace else input * noise

    return dropout


def _forked(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    @contextlib.contextmanager
    def fork(self: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        with original(self, *args, **kwargs):
            token = _inside_fork.set(bool(_applied))
            try:
                yield
            finally:
                _inside_fork.reset(token)

    return fork


class _Generators:
    """Stand-in for `torch.cuda.default_generators`, which has the one device's stream at every index."""

    def __getitem__(self, device: object) -> torch.Generator:
        return _stream

    def __len__(self) -> int:
        return 1


def _manual_seed(seed: int) -> None:
    _stream.manual_seed(int(seed))


def _seed() -> None:
    _stream.seed()


def _initial_seed() -> int:
    return _stream.initial_seed()


def _get_stream_state(device: Any = "cuda") -> torch.Tensor:
    return _stream.get_state()


def _get_stream_states() -> list[torch.Tensor]:
    return [_stream.get_state()]


def _set_stream_state(new_state: torch.Tensor, device: Any = "cuda", graph_safe: bool = False) -> None:
    _stream.set_state(new_state)


def _stream_bytes() -> bytes:
    """Return the stream's state as bytes, which are cheaper to store than a tensor."""
    return _stream.get_state().numpy().tobytes()


def _set_stream_bytes(state: bytes) -> None:
    _stream.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _set_stream_states(new_states: list[torch.Tensor]) -> None:
    for state in new_states:
        _stream.set_state(state)


_STREAM_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "manual_seed": _manual_seed,
    "manual_seed_all": _manual_seed,
    "seed": _seed,
    "seed_all": _seed,
    "initial_seed": _initial_seed,
    "get_rng_state": _get_stream_state,
    "get_rng_state_all": _get_stream_states,
    "set_rng_state": _set_stream_state,
    "set_rng_state_all": _set_stream_states,
}
