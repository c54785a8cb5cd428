"""Megatron's optimizer update, guarded: the local change under the lock, then the parameter gather.

Megatron's ``step_with_ready_grads`` combines the two. Once they are separated, the update is guarded like any other
(:mod:`checkpointless.recovery.guard`), and a gather that did not finish is repeated from the shards. A step whose
gradients overflow changes the loss scaler but no parameter; it is guarded, too, with nothing to apply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer, MixedPrecisionOptimizer
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
from megatron.core.utils import get_model_config

from checkpointless.inprocess import HPCallWrapper, UnrecoverableError
from checkpointless.integrations.compat.precision import DELAYED, fp8_recipe, unabortable, unsupported
from checkpointless.integrations.megatron.state import COLLECT, MegatronTensors, fp8_parameters, sub_optimizers
from checkpointless.recovery.guard import UpdateGuard


def announce_gradient_sync(chunk: torch.nn.Module, call: HPCallWrapper) -> None:
    """Announce the phase ``sync`` before Megatron reduces the gradients, if there are faults."""
    config = get_model_config(chunk)
    finalize = config.finalize_model_grads_func
    if call.faults is None or finalize is None or hasattr(finalize, "announces"):
        return

    def announced(*args: Any, **kwargs: Any) -> Any:
        call.enter_phase("sync", call.steps.making)
        return finalize(*args, **kwargs)

    announced.announces = True  # type: ignore[attr-defined]
    config.finalize_model_grads_func = announced


_REDUCES = ("finalize_model_grads_func", "grad_sync_func", "param_sync_func", "no_sync_func")  # in a schedule
_NOT_SEEN = "sdc_check_every does not see gradients with {} (or leave sdc_check_every out)"
_HIDDEN = ("gradient_accumulation_fusion", "delay_wgrad_compute", "enable_cuda_graph", "external_cuda_graph")


def check_contexts(every: int | None, chunks: Sequence[torch.nn.Module]) -> list[Callable[[], Any]]:
    """Return contexts for a repeated pass; ``UnrecoverableError`` if gradients pass no hook before their sum."""
    config = get_model_config(chunks[0])
    graphs = getattr(config, "cuda_graph_impl", "none")
    hidden = [f"cuda_graph_impl={graphs!r}: set it to 'none'"] if graphs != "none" else []
    hidden += [f"{name}=True: set it to False" for name in _HIDDEN if getattr(config, name, False)]
    if hidden and every is not None:
        raise UnrecoverableError(_NOT_SEEN.format(hidden[0]))
    return [partial(_unreduced, list(chunks)), _uncounted]


@contextmanager
def _uncounted() -> Iterator[None]:
    """Have the losses of experts that Megatron adds up in the context left out of their sums."""
    sums = [each["values"] for each in get_moe_layer_wise_logging_tracker().values()]
    kept = [each.clone() for each in sums]
    try:
        yield
    finally:
        for each, before in zip(sums, kept):
            each.copy_(before)


@contextmanager
def _unreduced(chunks: Sequence[Any]) -> Iterator[None]:
    """Have Megatron's schedules neither reduce the gradients of these DDP chunks in the context nor add them up."""
    flags = {"grad_added_to_main_grad": True, "zero_out_wgrad": False}
    changed: list[tuple[Any, dict[str, Any]]] = [
        (each, flags) for chunk in chunks for each in chunk.parameters() if each.requires_grad
    ]
    changed += [(get_model_config(chunk), dict.fromkeys(_REDUCES)) for chunk in chunks]
    kept = [(owner, {name: getattr(owner, name, False) for name in values}) for owner, values in changed]
    try:
        for owner, values in changed:
            vars(owner).update(values)
        with ExitStack() as stack:
            for chunk in chunks:
                stack.enter_context(chunk.no_sync())
            yield
    finally:
        for owner, values in reversed(kept):
            vars(owner).update(values)


def _obstacles(optimizer: MegatronOptimizer, models: Sequence[Any] = ()) -> Iterator[str]:
    """Yield why the update cannot be guarded, or the DDP chunks' state not carried over, and what to set."""
    optimizers, config = sub_optimizers(optimizer), optimizer.config
    for model in models:
        settings = getattr(model, "config", None)
        if reason := unabortable(settings):
            yield reason
        if reason := unsupported(settings):
            yield f"{reason} (NeMo: in MegatronMixedPrecision)"
    quantised = fp8_parameters(models)
    if quantised:
        yield from _obstacles_in_fp8(quantised, optimizers, fp8_recipe(getattr(models[0], "config", None)))
    if any(getattr(getattr(each, "ddp_config", None), "use_megatron_fsdp", False) for each in optimizers):
        yield (
            "checkpointless does not know the shards of Megatron's FSDP: set use_megatron_fsdp=False "
            "(NeMo: leave out fsdp='megatron')"
        )
    if getattr(config, "overlap_param_gather_with_optimizer_step", False):
        yield (
            "checkpointless cannot guard an update that is overlapped with the parameter gather: "
            "set overlap_param_gather_with_optimizer_step=False"
        )
    if any(isinstance(getattr(each, "optimizer", None), HybridDeviceOptimizer) for each in optimizers):
        yield (
            "checkpointless cannot take along what an optimizer that is offloaded to the CPU keeps for itself: "
            "set optimizer_cpu_offload=False"
        )
    if getattr(config, "use_precision_aware_optimizer", False):
        for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            dtype = getattr(config, name, torch.float32)
            if dtype not in (torch.float32, torch.bfloat16):
                yield (
                    f"checkpointless cannot take along the scales of an optimizer's state in {dtype}: "
                    f"set {name} to torch.float32 or torch.bfloat16"
                )


def _obstacles_in_fp8(
    parameters: Iterable[torch.nn.Parameter], optimizers: Sequence[Any], recipe: str
) -> Iterator[str]:
    """Yield why these parameters, which are kept in FP8, cannot be recovered exactly, and what to set."""
    if not all(parameter.requires_grad for parameter in parameters):
        yield "checkpointless cannot take along frozen parameters in FP8: set fp8_param_gather=False"
    for optimizer in optimizers:
        if getattr(getattr(optimizer, "config", None), "use_precision_aware_optimizer", False):
            yield (
                "checkpointless cannot derive parameters in FP8 from a precision-aware optimizer: "
                "set use_precision_aware_optimizer=False or fp8_param_gather=False"
            )
        if not isinstance(optimizer, DistributedOptimizer):
            yield (
                "checkpointless recovers parameters in FP8 from the distributed optimizer only: "
                "set use_distributed_optimizer=True or fp8_param_gather=False"
            )
        if not hasattr(DistributedOptimizer, COLLECT):
            yield (
                "checkpointless does not know how this Megatron-core quantises parameters in FP8: "
                "set fp8_param_gather=False"
            )
        if recipe == DELAYED and getattr(optimizer, "grad_scaler", None) is not None:
            yield (
                "checkpointless cannot take along parameters in FP8 whose scale changes in a step that is skipped: "
                "set loss_scale=None, fp8_recipe='tensorwise' or fp8_param_gather=False"
            )
        if any(is_float8tensor(each) for group in optimizer.param_groups for each in group["params"]):
            yield (
                "checkpointless cannot derive parameters in FP8 that have no main parameters: set params_dtype to "
                "torch.bfloat16 or fp8_param_gather=False"
            )


class NotedNorms:
    """Records gradient norm and zero count of an optimizer; Megatron returns None, 0.0 or 0 if not computed."""

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        # Megatron returns these values if it is not asked for the norm and the zero count.
        self._not_asked = (0.0, 0) if isinstance(optimizer, MixedPrecisionOptimizer) else (None, None)
        self.grad_norm: float | None = None
        self.num_zeros: float | None = None
        for name in ("get_grad_norm", "clip_grad_norm"):
            setattr(optimizer, name, self._noting(getattr(optimizer, name), "grad_norm"))
        optimizer.count_zeros = self._noting(optimizer.count_zeros, "num_zeros")

    def forget(self) -> None:
        self.grad_norm, self.num_zeros = self._not_asked

    def _noting(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            value = function(*args, **kwargs)
            setattr(self, name, value)
            return value

        return noting


class GuardedUpdate:
    """Replacement for ``prepare_grads`` and ``step_with_ready_grads`` of one (chained) Megatron optimizer."""

    def __init__(self, tensors: MegatronTensors, guard: UpdateGuard) -> None:
        optimizer: Any = tensors.optimizer
        reason = next(_obstacles(optimizer, tensors.modules), None)
        if reason is not None:
            raise UnrecoverableError(reason)
        self.overflow = False
        self._tensors = tensors
        self._guard = guard
        self._prepare_grads: Callable[[], bool] = optimizer.prepare_grads
        optimizer.prepare_grads = self.prepare_grads
        optimizer.step_with_ready_grads = self

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Make gradients final; return whether they overflow: the step is then committed, not applied."""
        self.overflow = bool(self._prepare_grads())
        if self.overflow:
            self._guard(lambda: True)
        return self.overflow

    def __call__(self) -> bool:
        """Vote, apply the update and gather the parameters."""
        succeeded = self._guard(self._tensors.apply)
        self._tensors.gather(late=False)
        return succeeded
