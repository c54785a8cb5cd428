"""CPU as a real platform: Megatron-core and NeMo train on CPU over gloo, unchanged.

Megatron-core calls `torch.cuda` directly. `install()` replaces what it calls there, and the factories and methods
that place a tensor, so that "the current CUDA device" is the CPU. Each replacement is one row of the table that the
functions `..._rows` make up, and `uninstall()` restores the very object that was there before.
`torch.cuda.is_available()` stays False: Lightning picks its CPU accelerator and gloo.

Random numbers. A GPU has a separate generator, whose state Megatron's tracker swaps; it expects the CPU's generator
to be left alone. If everything were drawn from that one here, a data loader that draws a seed would change the
dropout masks, and tensor-parallel ranks would get equal weights. So the platform has a device stream, one
`torch.Generator`, on which the functions of `torch.cuda` and through them the tracker act. A draw uses it

* always for `dropout`, and for factories that are asked for a CUDA device (`torch.rand(..., device="cuda")`);
* inside `CudaRNGStatesTracker.fork()`, for every random function in `_DRAWS` and every method in `_DRAW_METHODS`;

and the CPU's generator otherwise: in an in-place draw outside a fork on what would have been a CUDA tensor, too.
The generator is passed to the draw. If states were swapped into the default one instead, `torch.get_rng_state()` in
a fork would read the wrong stream (activation recomputation does just that), other threads could draw from it, and
an exception that arrives asynchronously could leave a swap half done.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib
import importlib.util
import os
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.utils._device

from checkpointless.state.rng import register_rng_source
from checkpointless.system.environment import CPU_ENV
from checkpointless.system.patches import Patch, Patches


def requested() -> bool:
    """Return whether the environment asks for the platform (`CHECKPOINTLESS_CPU=1`)."""
    return os.environ.get(CPU_ENV, "") == "1"


def installed() -> bool:
    """Return whether the platform is installed."""
    return _replacements.are_made


def install() -> None:
    """Install the platform, or, if it is installed already, forget a fork that was interrupted.

    Imports parts of Megatron-core if it is installed (a few seconds, once per process or per zygote), because
    the tracker is part of the platform. NeMo and Megatron-Bridge are not imported; a call after one of them has
    been imported adds what it needs: NeMo to load a checkpoint and for LoRA, Bridge to train at all.

    Raises:
        RuntimeError: CUDA is available or in use in this process.
    """
    _inside_fork.set(False)
    if installed():
        _replacements.make([row for row in _rows_of_what_is_imported() if not _replacements.touch(row.target)])
        return
    if torch.cuda.is_available() or torch.cuda.is_initialized():
        raise RuntimeError(
            "the CPU platform stands in for CUDA and this process has CUDA: leave out --cpu "
            f"(unset {CPU_ENV}), or hide the devices with CUDA_VISIBLE_DEVICES=''"
        )
    # `with torch.device(...)` keeps a cached set of the real factories: fill it before they are replaced.
    torch.utils._device._device_constructors()
    patches = [*_table(), *_rows_of_what_is_imported()]
    _stream.manual_seed(torch.initial_seed() % 2**63)
    _replacements.make(patches)
    register_rng_source("cpu_platform", _stream_bytes, _set_stream_bytes)


def uninstall() -> None:
    """Restore exactly what `install()` replaced; do nothing if the platform is not installed."""
    _replacements.undo()


def _table() -> list[Patch]:
    return [*_cuda_rows(), *_placement_rows(), *_draw_rows(), *_core_rows()]


def _rows_of_what_is_imported() -> list[Patch]:
    of_lm = _pretrain_rows("megatron.training.training", "initialize", "_compile_dependencies")
    arguments = sys.modules.get("megatron.training.arguments")
    if arguments is not None:
        why = "it checks by the device's generation which settings fit"
        of_lm.append(Patch(arguments, "get_device_arch_version", _constant(10), why))
    return [*_rows(), *_bridge_rows(), *of_lm]


# --- Replacements in NeMo -----------------------------------------------------------------------------------------


def _rows() -> list[Patch]:
    """Return the replacements in the modules of NeMo that have been imported: to import it takes ten seconds."""
    table: list[Patch] = []
    checkpoint_io = sys.modules.get("nemo.lightning.io.pl")
    if checkpoint_io is not None:
        why = "it wants CUDA to be initialized, to move what was loaded to the current device"
        table.append(Patch(checkpoint_io, "_fix_tensors_device", lambda _: _itself, why))
    lora = sys.modules.get("nemo.collections.llm.peft.lora")
    if lora is not None and not getattr(lora, "HAVE_TE", True):
        why = "it asks of every layer whether it is TransformerEngine's, which raises where that is not installed"
        table.append(Patch(lora, "te", lambda _: _Absent(_ENGINE), why))
        why = "it takes Megatron's names of TransformerEngine's layers for the layers, where they are None"
        table.append(Patch(sys.modules["nemo.collections.llm.peft.utils"], "HAVE_TE", lambda _: False, why))
    return table


# --- What the CPU platform replaces in torch --------------------------------------------------------------------

_T = TypeVar("_T")

#: The replacements of this process.
_replacements = Patches()


def _constant(value: _T) -> Callable[[object], Callable[..., _T]]:
    return lambda _: lambda *args, **kwargs: value


def _replaced_by(replacement: _T) -> Callable[[object], _T]:
    return lambda _: replacement


def _itself(self: _T, *args: Any, **kwargs: Any) -> _T:
    """Return the object whose method this is, as a move does that has nothing to do."""
    return self


# --- The device's stream of random numbers: one generator, on which the functions of `torch.cuda` act -------------


#: The stream.
_stream = torch.Generator()
#: Whether the caller is in `CudaRNGStatesTracker.fork()`, where all draws are the tracker's.
_inside_fork: ContextVar[bool] = ContextVar("checkpointless_cpu_platform_inside_fork", default=False)


class _Generators:
    """Stand-in for `torch.cuda.default_generators`, which has the one device's stream at every index."""

    def __getitem__(self, device: object) -> torch.Generator:
        return _stream

    def __len__(self) -> int:
        return 1


def _set_stream_state(new_state: torch.Tensor, device: object = "cuda", graph_safe: bool = False) -> None:
    _stream.set_state(new_state)


def _stream_bytes() -> bytes:
    """Return the stream's state as bytes, which are cheaper to store than a tensor."""
    return _stream.get_state().numpy().tobytes()


def _set_stream_bytes(state: bytes) -> None:
    _stream.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


#: Functions of `torch.cuda` and `torch.cuda.random`, by name.
_STREAM_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "manual_seed": lambda seed: _stream.manual_seed(int(seed)),
    "manual_seed_all": lambda seed: _stream.manual_seed(int(seed)),
    "seed": _stream.seed,
    "seed_all": _stream.seed,
    "initial_seed": _stream.initial_seed,
    "get_rng_state": lambda device="cuda": _stream.get_state(),
    "get_rng_state_all": lambda: [_stream.get_state()],
    "set_rng_state": _set_stream_state,
    "set_rng_state_all": lambda states: [_stream.set_state(state) for state in states],  # of one device, or of none
}


# --- tensors and modules: what asks for a CUDA device is placed on the CPU ----------------------------------------


_CPU = torch.device("cpu")

_FACTORIES = (
    *("tensor", "as_tensor", "scalar_tensor", "empty", "zeros", "ones", "full", "eye", "arange", "linspace"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "empty_strided"),
)
_NEW_TENSOR_METHODS = ("new_tensor", "new_empty", "new_zeros", "new_ones", "new_full")


def _placement_rows() -> list[Patch]:
    table = [
        Patch(torch.Tensor, "cuda", lambda _: _itself, "a tensor is already where it should be"),
        Patch(torch.Tensor, "pin_memory", lambda _: _itself, "pinning needs a CUDA driver"),
        Patch(torch.nn.Module, "cuda", lambda _: _itself, "a module is already where it should be"),
        Patch(torch.Tensor, "to", _on_cpu, "moves to `cuda` stay where they are"),
        Patch(torch.Tensor, "type", _typed, "Megatron's optimizers compare with 'torch.cuda.FloatTensor'"),
    ]
    why = "`device='cuda'` means the CPU"
    table += [Patch(torch, name, _on_cpu, why) for name in _FACTORIES]
    table += [Patch(torch.Tensor, name, _on_cpu, why) for name in _NEW_TENSOR_METHODS]
    return table


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":", 1)[0] == "cuda"


def _on_cpu(original: Callable[..., Any], draws: bool = False) -> Callable[..., Any]:
    """Return a function like `original` to which a CUDA device means the CPU, wherever it is in the arguments."""

    @functools.wraps(original)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if _replacements.are_made:
            kwargs.pop("pin_memory", None)
            args = tuple(_CPU if _is_cuda(each) else each for each in args)
            on_device = _is_cuda(kwargs.get("device"))
            if on_device:
                kwargs["device"] = _CPU
            if draws and (on_device or _inside_fork.get()) and kwargs.get("generator") is None:
                kwargs["generator"] = _stream
        return original(*args, **kwargs)

    return on_cpu


_drawn = functools.partial(_on_cpu, draws=True)


def _typed(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not _replacements.are_made:
            return original(self, dtype, *args, **kwargs)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        result = original(self, dtype, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.") if isinstance(result, str) else result

    return type_


# --- draws: which of them use the device's stream -----------------------------------------------------------------


_DRAWS = (
    *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson"),
    *("rand_like", "randn_like", "randint_like"),
)
_DRAW_METHODS = (
    *("normal_", "uniform_", "bernoulli_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_"),
    *("bernoulli", "multinomial"),
)


def _draw_rows() -> list[Patch]:
    dropout = Patch(torch.nn.functional, "dropout", _device_dropout, "dropout draws from the device's stream")
    why = "draws in a tracker's fork are the tracker's"
    table = [dropout, *(Patch(torch, name, _drawn, why) for name in _DRAWS)]
    table += [Patch(torch.Tensor, name, _drawn, why) for name in _DRAW_METHODS]
    return table


def _device_dropout(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        is_drawn = training and 0.0 < p < 1.0 and input.numel()
        # A graph takes no generator. torch 2.11 does not say that it compiles when it gives tensors of its own.
        is_traced = torch.compiler.is_compiling() or type(input) not in (torch.Tensor, torch.nn.Parameter)
        if not is_drawn or is_traced or not _replacements.are_made:
            return original(input, p, training, inplace)
        # This is the arithmetic of ATen's native dropout, which takes no generator.
        noise = torch.empty_like(input).bernoulli_(1.0 - p, generator=_stream).div_(1.0 - p)
        return input.mul_(noise) if inplace else input * noise

    return dropout


# --- `torch.cuda`: the current device is the CPU, and all work is done when a call returns ------------------------


_TENSOR_TYPES = (
    *("FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor"),
    *("ByteTensor", "CharTensor", "ShortTensor", "IntTensor", "LongTensor", "BoolTensor"),
)


def _cuda_rows() -> list[Patch]:
    cuda = torch.cuda
    table = [
        Patch(cuda, "current_device", _constant(_CPU), "tensors are created on `torch.cuda.current_device()`"),
        Patch(cuda, "set_device", _constant(None), "there is one device"),
        Patch(cuda, "device_count", _constant(1), "NeMo seeds Megatron's tracker only where a device is counted"),
        Patch(cuda, "is_available", _constant(False), "torch counts devices where Lightning has it ask NVML"),
        Patch(cuda, "_is_in_bad_fork", _constant(False), "in builds for CUDA, counting devices forbids forks"),
        Patch(cuda, "synchronize", _constant(None), "nothing is queued"),
        Patch(cuda, "Stream", lambda _: _Done, "work is done when the call returns"),
        Patch(cuda, "Event", lambda _: _Done, "as for streams; timers read it"),
        Patch(cuda, "stream", lambda _: contextlib.nullcontext, "as for streams"),
        Patch(cuda, "set_stream", _constant(None), "as for streams"),
        Patch(cuda, "current_stream", lambda _: _Done, "as for streams"),
        Patch(cuda, "default_stream", lambda _: _Done, "as for streams"),
        Patch(cuda, "is_current_stream_capturing", _constant(False), "Megatron asks; there are no CUDA graphs"),
        Patch(cuda, "default_generators", lambda _: _Generators(), "Megatron sets the state of its element"),
    ]
    for module in (torch.cuda, torch.cuda.random):
        table += [
            Patch(module, name, _replaced_by(function), "the device's stream is a generator")
            for name, function in _STREAM_FUNCTIONS.items()
        ]
    why = "NeMo's fine-tuning data makes a `torch.cuda.LongTensor`"
    table += [Patch(cuda, name, _replaced_by(getattr(torch, name)), why) for name in _TENSOR_TYPES]
    return table


class _Done:
    """Stand-in for a CUDA stream or event: all work is done when a call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._recorded_s = 0.0

    def __enter__(self) -> _Done:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self, *args: object) -> None:
        """Return at once: nothing is queued."""

    wait = wait_stream = wait_event = synchronize

    def record(self, stream: object = None) -> None:
        self._recorded_s = time.perf_counter()

    def record_event(self, event: _Done | None = None) -> _Done:
        recorded = event or _Done()
        recorded.record()
        return recorded

    def elapsed_time(self, end: _Done) -> float:
        return (end._recorded_s - self._recorded_s) * 1e3


# --- What is replaced in Megatron-core: its tracker of random streams, timers, router, and checkpoints ------------

_RANDOM = "megatron.core.tensor_parallel.random"
_GET_STATES, _SET_STATES = "_get_main_param_and_optimizer_states", "_set_main_param_and_optimizer_states"


def _core_rows() -> list[Patch]:
    """Return the replacements in Megatron-core, whose parts are imported for it; none if it is not installed."""
    if not _is_there(_RANDOM):
        return []
    tracker = importlib.import_module(_RANDOM)
    table = [
        Patch(tracker, "_set_cuda_rng_state", lambda _: _set_stream_state, "it is queued until CUDA starts"),
        Patch(tracker.CudaRNGStatesTracker, "fork", _forked, "marks where draws are the tracker's"),
    ]
    timers = importlib.import_module("megatron.core.timers").Timers
    why = "NeMo's progress printer calls it on rank 0 alone; gloo counts a collective of no elements, too"
    table.append(Patch(timers, "_get_elapsed_time_all_ranks", _if_there_are_names, why))
    moe = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe, "te_general_gemm"):
        why = "Megatron's router asks whether it is None, and defines it only beside TransformerEngine"
        table.append(Patch(moe, "te_general_gemm", _replaced_by(None), why))
    sharded_tensor = importlib.import_module("megatron.core.dist_checkpointing.mapping").ShardedTensor
    table.append(Patch(sharded_tensor, "init_data", _on_cpu, "its default is the real `torch.empty`"))
    return table + _optimizer_rows()


def _optimizer_rows() -> list[Patch]:
    optimizer = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    if optimizer.HAVE_APEX_OR_TE:
        return []
    distributed = optimizer.DistributedOptimizer
    return [
        Patch(distributed, "state_dict", _with_state, "it asks for the step, before the first one too"),
        Patch(distributed, "load_state_dict", _with_own_steps, "one step tensor is shared by all parameters"),
        Patch(distributed, _GET_STATES, _without_step, "the step is taken for a shard of a parameter"),
        Patch(distributed, _SET_STATES, _keeping_step, "as for the other direction"),
    ]


def _forked(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    @contextlib.contextmanager
    def fork(self: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        with original(self, *args, **kwargs):
            token = _inside_fork.set(_replacements.are_made)
            try:
                yield
            finally:
                _inside_fork.reset(token)

    return fork


def _if_there_are_names(gather: Any) -> Any:
    def elapsed_time_all_ranks(timers: Any, names: Any, reset: bool, barrier: bool) -> torch.Tensor:
        if not names:
            return torch.zeros((torch.distributed.get_world_size(), 0))
        return gather(timers, names, reset, barrier)

    return elapsed_time_all_ranks


def _with_state(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def state_dict(self: Any) -> Any:
        if _replacements.are_made and self.optimizer is not None and not self.optimizer.state:
            # Adam creates this state when it takes its first step.
            self.init_state_fn(self.optimizer, self.config)
            for state in self.optimizer.state.values():
                state["step"] = torch.tensor(0.0)
        return original(self)

    return state_dict


def _with_own_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> Any:
        original(self, state_dict)
        if _replacements.are_made and self.optimizer is not None:
            for state in self.optimizer.state.values():  # Adam increments each in place
                state["step"] = state["step"].clone()

    return load_state_dict


def _without_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_states(self: Any, model_param: Any) -> Any:
        states = original(self, model_param)
        return {key: state for key, state in states.items() if key != "step"} if _replacements.are_made else states

    return get_states


def _keeping_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        if _replacements.are_made:
            group, position = self.model_param_group_index_map[model_param]
            main_param = self.optimizer.param_groups[group]["params"][position]
            tensors = {**tensors, "step": self.optimizer.state[main_param]["step"]}
        with torch.no_grad():  # in fp32 a main parameter is a view of the model's parameter
            original(self, model_param, tensors)

    return set_states


# --- Megatron-Bridge, which is to be imported without TransformerEngine -------------------------------------------


_ENGINE = "transformer_engine"
#: What training needs nothing of, and the modules of Bridge that import it outside of any ``try``, by their
#: beginning. Wheels of nvidia-resiliency-ext need glibc 2.39.
_NOT_NEEDED = {
    _ENGINE: ("megatron.bridge.peft.lora", "megatron.bridge.models.gpt_full_te_layer_autocast_spec"),
    "nvidia_resiliency_ext": ("megatron.bridge.training.pretrain",),
    "megatron.energon": ("megatron.bridge.",),
}


def _bridge_rows() -> list[Patch]:
    """Return the replacements in Bridge, if imported, and classes for packages that its modules demand in vain."""
    if not _is_there("megatron.bridge") or _is_there(_ENGINE):
        return []
    table = [Patch(builtins, "__import__", _answering, "Bridge imports TransformerEngine outside of any `try`")]
    return [*table, *_pretrain_rows("megatron.bridge.training.setup", "initialize", "compile_helpers")]


def _pretrain_rows(setup: str, initialize: str, compiles: str) -> list[Patch]:
    """Return the replacements in the modules of a ``pretrain``, if imported, and of what ``compiles`` datasets."""
    sets_up, initializes = (sys.modules.get(name) for name in (setup, f"{setup.rpartition('.')[0]}.{initialize}"))
    if sets_up is None or initializes is None:
        return []
    return [
        Patch(sets_up, "initialize_megatron", _without_cuda, "it requires CUDA unless it is told not to"),
        Patch(sets_up, "set_jit_fusion_options", _constant(None), "it compiles fusions for a device"),
        Patch(initializes, compiles, _constant(None), "the wheel has what it makes, and no Makefile"),
        Patch(torch.distributed, "barrier", _without_devices, "gloo's refuses `device_ids`"),
    ]


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _answering(original: Callable[..., types.ModuleType]) -> Callable[..., types.ModuleType]:
    def import_(
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> types.ModuleType:
        asks = (globals or {}).get("__name__")
        if not level and isinstance(asks, str) and _is_lacking(name, asks):
            if fromlist:
                return _Absent(name)
            if name.startswith(_ENGINE):  # of the others the outer package is there
                return _Absent(_ENGINE)
        return original(name, globals, locals, fromlist, level)

    return import_


def _is_lacking(name: str, asks: str) -> bool:
    """Return whether the module ``asks`` imports what is not installed and not needed."""
    for package, importers in _NOT_NEEDED.items():
        if asks.startswith(importers) and f"{name}.".startswith(f"{package}."):
            return not _is_there(package)
    return False


class _Absent(types.ModuleType):
    """A module that is not installed; its names are such modules, and classes without instances."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(name) if name.islower() else type(name, (torch.nn.Module,), {})


def _without_cuda(initialize: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(initialize, allow_no_cuda=True)


def _without_devices(barrier: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(barrier)
    def on_cpu(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return barrier(group=group, async_op=async_op)

    return on_cpu
