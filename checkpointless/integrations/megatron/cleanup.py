"""Drop what Megatron-core keeps in globals, so that a generation leaves nothing in the process."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import full_cuda_graph, num_microbatches_calculator, parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.rerun_state_machine import destroy_rerun_state_machine
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import cuda_graphs

from checkpointless.inprocess.finalize import register_cleanup
from checkpointless.integrations.compat.megatron import CudagraphGlobalRecord
from checkpointless.integrations.megatron import cpu_platform
from checkpointless.state.rng import register_rng_source

_LM_GLOBALS = "megatron.training.global_vars"  # of Megatron-LM, whose arguments are set once
_HOOK_MAKER = "_make_backward_post_hook"


def install() -> None:
    """Prepare this process for re-entry: leak-free gradient hooks, clean-up, random streams (idempotent).

    If the job was started with ``--cpu``, Megatron is made to train on CPUs, as far as it has been imported.
    """
    if cpu_platform.requested():
        cpu_platform.install()
    maker = getattr(DistributedDataParallel, _HOOK_MAKER)
    if not getattr(maker, "_checkpointless", False):
        setattr(DistributedDataParallel, _HOOK_MAKER, _weak_hooks(maker))
    register_cleanup("megatron", _drop_globals)
    register_rng_source("megatron", _tracker_states, _set_tracker_states)


def _drop_globals() -> None:
    """Drop the process groups, microbatch calculator, graphs and caches of the generation that is over."""
    parallel_state.destroy_model_parallel()
    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, torch.distributed.ProcessGroup):  # it forgets most of them, not all
            setattr(parallel_state, name, None)
    num_microbatches_calculator.unset_num_microbatches_calculator()
    destroy_rerun_state_machine()
    if CudagraphGlobalRecord.cudagraph_created or CudagraphGlobalRecord.cudagraph_record:
        cuda_graphs.delete_cuda_graphs()
    CudagraphGlobalRecord.cudagraph_inference_record = []
    _forget_whole_iterations()
    for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
        clear = getattr(embedding.forward, "cache_clear", None)
        if clear is not None:
            clear()
    if _LM_GLOBALS in sys.modules:
        sys.modules[_LM_GLOBALS].destroy_global_vars()
    if cpu_platform.installed():
        cpu_platform.install()  # this forgets an interrupted fork of the tracker


def _forget_whole_iterations() -> None:
    wrapper = full_cuda_graph.FullCudaGraphWrapper
    for name in ("curr_iteration", "cuda_graph", "result"):
        kept: dict[str, Any] = getattr(wrapper, name)
        kept.update(dict.fromkeys(kept, 0 if name == "curr_iteration" else None))
    buffers: dict[str, list[Any]] = full_cuda_graph.StaticBufferLoader.static_buffers
    buffers.update({stage: [] for stage in buffers})


def _weak_hooks(maker: Callable[[Any, torch.nn.Parameter], Callable[..., None]]) -> Any:
    """Return a maker of gradient hooks that hold the model weakly: from C++ they would keep every earlier model."""

    def weak(self: Any, parameter: torch.nn.Parameter) -> Callable[..., None]:
        wrapper_ref, parameter_ref = weakref.ref(self), weakref.ref(parameter)

        def hook(*unused: Any) -> None:
            wrapper, target = wrapper_ref(), parameter_ref()
            if wrapper is not None and target is not None:
                maker(wrapper, target)(*unused)

        return hook

    weak._checkpointless = True  # type: ignore[attr-defined]
    return weak


def _tracker_states() -> dict[str, bytes]:
    """Return the tracker's states as bytes; one for CUDA graphs keeps generators."""
    return {name: _bytes(state) for name, state in get_cuda_rng_tracker().get_states().items()}


def _bytes(state: torch.Tensor | torch.Generator) -> bytes:
    return (state.get_state() if isinstance(state, torch.Generator) else state).numpy().tobytes()


def _set_tracker_states(states: dict[str, bytes]) -> None:
    tracker = get_cuda_rng_tracker()
    present = tracker.get_states()
    tracker.set_states({name: _restored(state, present.get(name)) for name, state in states.items()})


def _restored(state: bytes, present: torch.Tensor | torch.Generator | None) -> torch.Tensor | torch.Generator:
    """Return the state to track; a generator that is there is kept, because graphs draw from it."""
    tensor = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    if not isinstance(present, torch.Generator):
        return tensor
    present.set_state(tensor)
    return present
