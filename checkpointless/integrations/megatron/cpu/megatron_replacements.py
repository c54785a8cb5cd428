"""What is replaced in Megatron-core: its tracker of random streams, its timers and router, and its checkpoints."""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from checkpointless.integrations.megatron.cpu.torch_replacements import (
    constant,
    inside_fork,
    moved,
    replaced_by,
    replacements,
    set_stream_state,
)
from checkpointless.system.patches import Patch

_RANDOM = "megatron.core.tensor_parallel.random"
_MOE = "megatron.core.transformer.moe.moe_utils"
_CHECKPOINT = "megatron.core.dist_checkpointing.mapping"
_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
_TIMERS = "megatron.core.timers"
_GET_STATES, _SET_STATES = "_get_main_param_and_optimizer_states", "_set_main_param_and_optimizer_states"


def core_rows() -> list[Patch]:
    """Return the replacements in Megatron-core, whose parts are imported for it; none if it is not installed."""
    if not _is_importable(_RANDOM):
        return []
    tracker = importlib.import_module(_RANDOM)
    table = [
        Patch(tracker, "_set_cuda_rng_state", lambda _: set_stream_state, "it is queued until CUDA starts"),
        Patch(tracker.CudaRNGStatesTracker, "fork", _forked, "marks where draws are the tracker's"),
    ]
    timers = importlib.import_module(_TIMERS).Timers
    why = "NeMo's progress printer calls it on rank 0 alone; gloo counts a collective of no elements, too"
    table.append(Patch(timers, "_get_elapsed_time_all_ranks", _if_there_are_names, why))
    moe = importlib.import_module(_MOE)
    if not hasattr(moe, "te_general_gemm"):
        why = "Megatron's router asks whether it is None, and defines it only beside TransformerEngine"
        table.append(Patch(moe, "te_general_gemm", replaced_by(None), why))
    sharded_tensor = importlib.import_module(_CHECKPOINT).ShardedTensor
    table.append(Patch(sharded_tensor, "init_data", moved, "its default is the real `torch.empty`"))
    return table + _optimizer_rows()


def _optimizer_rows() -> list[Patch]:
    """Return the replacements that serve checkpoints of torch's own Adam, whose state has a `step`."""
    optimizer = importlib.import_module(_OPTIMIZER)
    if optimizer.HAVE_APEX_OR_TE:
        return []
    distributed = optimizer.DistributedOptimizer
    return [
        Patch(distributed, "state_dict", _with_state, "it asks for the step, before the first one too"),
        Patch(distributed, "load_state_dict", _with_own_steps, "one step tensor is shared by all parameters"),
        Patch(distributed, _GET_STATES, _without_step, "the step is taken for a shard of a parameter"),
        Patch(distributed, _SET_STATES, _keeping_step, "as for the other direction"),
    ]


def _is_importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _forked(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    @contextlib.contextmanager
    def fork(self: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        with original(self, *args, **kwargs):
            token = inside_fork.set(replacements.are_made)
            try:
                yield
            finally:
                inside_fork.reset(token)

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
        if replacements.are_made and self.optimizer is not None and not self.optimizer.state:
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
        if replacements.are_made and self.optimizer is not None:
            for state in self.optimizer.state.values():  # Adam increments each in place
                state["step"] = state["step"].clone()
        return result

    return load_state_dict


def _without_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_states(self: Any, model_param: Any) -> Any:
        states = original(self, model_param)
        return {key: state for key, state in states.items() if key != "step"} if replacements.are_made else states

    return get_states


def _keeping_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        if replacements.are_made:
            group, position = self.model_param_group_index_map[model_param]
            main_param = self.optimizer.param_groups[group]["params"][position]
            tensors = {**tensors, "step": self.optimizer.state[main_param]["step"]}
        with torch.no_grad():  # in fp32 a main parameter is a view of the model's parameter
            original(self, model_param, tensors)

    return set_states


# --- Megatron-Bridge, which is to be imported without TransformerEngine -------------------------------------------


_SETUP = "megatron.bridge.training.setup"
_INITIALIZE = "megatron.bridge.training.initialize"
_ENGINE = "transformer_engine"
#: The modules that import TransformerEngine outside of any ``try``.
_DEMANDING = (
    "megatron.bridge.peft.lora",
    "megatron.bridge.peft.lora_layers",
    "megatron.bridge.models.gpt_full_te_layer_autocast_spec",
)
#: What training needs nothing of, and the modules of Bridge 0.6 that import it outside of any ``try``, by their
#: beginning. Wheels of the first need glibc 2.39.
_NOT_NEEDED = {
    "nvidia_resiliency_ext": "megatron.bridge.training.pretrain",
    "megatron.energon": "megatron.bridge.",
}


def bridge_rows() -> list[Patch]:
    """Return the replacements that Bridge needs to be imported, and those in Bridge if it has been.

    Some of its modules demand packages that training does not need. They alone are answered, with classes that have
    no instances; everybody else still gets ``ImportError``, and Megatron-core knows that there is no
    TransformerEngine. Bridge is not imported here, which takes ten seconds.
    """
    if not _is_there("megatron.bridge") or _is_there(_ENGINE):
        return []
    table = [Patch(builtins, "__import__", _answering, "Bridge imports TransformerEngine outside of any `try`")]
    setup, initialize = sys.modules.get(_SETUP), sys.modules.get(_INITIALIZE)
    if setup is not None and initialize is not None:
        table += [
            Patch(setup, "initialize_megatron", _without_cuda, "it requires CUDA unless it is told not to"),
            Patch(setup, "set_jit_fusion_options", constant(None), "it compiles fusions for a device"),
            Patch(initialize, "compile_helpers", constant(None), "the wheel has what it makes, and no Makefile"),
            Patch(torch.distributed, "barrier", _without_devices, "gloo's refuses `device_ids`"),
        ]
    return table


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _answering(original: Callable[..., types.ModuleType]) -> Callable[..., types.ModuleType]:
    engine, pytorch = types.ModuleType(_ENGINE), types.ModuleType(f"{_ENGINE}.pytorch")
    layers = {
        name: type(name, (torch.nn.Module,), {}) for name in ("Linear", "LayerNormLinear", "TransformerLayer")
    }
    vars(pytorch).update(layers, ops=types.SimpleNamespace(Sequential=type("Sequential", (torch.nn.Module,), {})))
    vars(engine).update(pytorch=pytorch)

    def import_(
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> types.ModuleType:
        asks = (globals or {}).get("__name__")
        if asks in _DEMANDING and name.partition(".")[0] == _ENGINE:
            return pytorch if fromlist else engine
        if fromlist and not level and isinstance(asks, str) and _is_lacking(name, asks):
            return _Absent(name)
        return original(name, globals, locals, fromlist, level)

    return import_


def _is_lacking(name: str, asks: str) -> bool:
    """Return whether the module ``asks`` imports what is not installed and not needed."""
    for package, importer in _NOT_NEEDED.items():
        if asks.startswith(importer) and f"{name}.".startswith(f"{package}."):
            return not _is_there(package)
    return False


class _Absent(types.ModuleType):
    """A module that is not installed; each of its names is a class without instances."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _without_cuda(initialize: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(initialize, allow_no_cuda=True)


def _without_devices(barrier: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(barrier)
    def on_cpu(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return barrier(group=group, async_op=async_op)

    return on_cpu
