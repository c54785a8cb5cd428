"""What is replaced in Megatron-Bridge, so that it is imported without TransformerEngine and trains on CPU."""

from __future__ import annotations

import builtins
import functools
import importlib.util
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from checkpointless.integrations.megatron.cpu.replacements import constant
from checkpointless.system.patches import Patch

_SETUP = "megatron.bridge.training.setup"
_INITIALIZE = "megatron.bridge.training.initialize"
_ENGINE = "transformer_engine"
#: The modules that import TransformerEngine outside of any ``try``.
_DEMANDING = (
    "megatron.bridge.peft.lora",
    "megatron.bridge.peft.lora_layers",
    "megatron.bridge.models.gpt_full_te_layer_autocast_spec",
)


def rows() -> list[Patch]:
    """Return the replacements that Bridge needs to be imported, and those in Bridge if it has been.

    Three of its modules demand TransformerEngine. They alone are answered, with classes that have no instances;
    everybody else still gets ``ImportError``, and Megatron-core knows that it is not there. Bridge is not imported
    here, which takes ten seconds.
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
        return original(name, globals, locals, fromlist, level)

    return import_


def _without_cuda(initialize: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(initialize, allow_no_cuda=True)


def _without_devices(barrier: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(barrier)
    def on_cpu(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return barrier(group=group, async_op=async_op)

    return on_cpu
