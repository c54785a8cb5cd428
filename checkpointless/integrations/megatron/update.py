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
from checkpointless.recovery.guard import UpdateGuard

_UNSCALED = (torch.float32, torch.bfloat16)


def sub_optimizers(optimizer: MegatronOptimizer | None) -> list[Any]:
    """Return the optimizers chained in ``optimizer``, or a list of ``optimizer`` alone."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


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


def _hides_gradients(chunk: torch.nn.Module) -> str | None:
    """Return the setting with which gradients pass no hook before they are added up; None: there is none."""
    config = get_model_config(chunk)
    if getattr(config, "cuda_graph_impl", "none") != "none":
        return f"cuda_graph_impl={config.cuda_graph_impl!r}: set it to 'none'"
    return next((f"{name}=True: set it to False" for name in _HIDDEN if getattr(config, name, False)), None)


def check_contexts(every: int | None, chunks: Sequence[torch.nn.Module]) -> list[Callable[[], Any]]:
    """Return the contexts in which a pass of the chunks is repeated to check gradients in every so many steps.

    Raises:
        UnrecoverableError: a setting keeps gradients from being seen.
    """
    hidden = _hides_gradients(chunks[0]) if every is not None else None
    if hidden is not None:
        raise UnrecoverableError(_NOT_SEEN.format(hidden))
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
    """Have Megatron's schedules neither reduce gradients in the context nor add them up.

    ``chunks`` are the model's, as Megatron's ``DistributedDataParallel`` wraps them.
    """
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


def update_locally(optimizers: Sequence[Any]) -> bool:
    """Apply the gradients that the optimizers hold to this rank's shards, without communication.

    Return whether every optimizer reports that it succeeded.
    """
    succeeded = True
    for optimizer in optimizers:
        if isinstance(optimizer, DistributedOptimizer):
            with left_as_they_are(optimizer):
                succeeded &= bool(MixedPrecisionOptimizer.step_with_ready_grads(optimizer))
        else:
            succeeded &= bool(type(optimizer).step_with_ready_grads(optimizer))
    return succeeded


def gather_parameters(optimizers: Sequence[Any], force: bool = False) -> None:
    """Gather every rank's shards into the model's parameters; those in FP8 are quantised. This is a collective.

    Args:
        force: gather even where the optimizer leaves it to the next forward pass (``overlap_param_gather``).
    """
    _quantize(optimizers)
    chunks: list[Any] = []
    for optimizer in optimizers:
        if isinstance(optimizer, DistributedOptimizer) and (force or not optimizer.ddp_config.overlap_param_gather):
            chunks += [chunk for chunk in optimizer.model_chunks if not any(chunk is known for known in chunks)]
    for chunk in chunks:
        chunk.start_param_sync(force_sync=force)


def _unguardable(optimizer: MegatronOptimizer, models: Iterable[Any] = ()) -> str | None:
    """Return why the update of ``optimizer`` cannot be guarded, or its state not be carried over, and what to set.

    ``models`` are the model's chunks, as Megatron's ``DistributedDataParallel`` wraps them. None: it can.
    """
    models = list(models)
    for model in models:
        config = getattr(model, "config", None)
        reason = unabortable(config)
        if reason is not None:
            return reason
        reason = unsupported(config)
        if reason is not None:
            return f"{reason} (NeMo: in MegatronMixedPrecision)"
    quantised = fp8_parameters(models)
    if not all(parameter.requires_grad for parameter in quantised):
        return "checkpointless cannot take along frozen parameters in FP8: set fp8_param_gather=False"
    recipe = fp8_recipe(next((getattr(model, "config", None) for model in models), None))
    for each in sub_optimizers(optimizer) if quantised else ():
        reason = _unsupported_optimizer(each, recipe)
        if reason is not None:
            return reason
    if any(
        getattr(getattr(each, "ddp_config", None), "use_megatron_fsdp", False) for each in sub_optimizers(optimizer)
    ):
        return (
            "checkpointless does not know the shards of Megatron's FSDP: set use_megatron_fsdp=False "
            "(NeMo: leave out fsdp='megatron')"
        )
    config = optimizer.config
    if getattr(config, "overlap_param_gather_with_optimizer_step", False):
        return (
            "checkpointless cannot guard an update that is overlapped with the parameter gather: "
            "set overlap_param_gather_with_optimizer_step=False"
        )
    if any(
        isinstance(getattr(each, "optimizer", None), HybridDeviceOptimizer) for each in sub_optimizers(optimizer)
    ):
        return (
            "checkpointless cannot take along what an optimizer that is offloaded to the CPU keeps for itself: "
            "set optimizer_cpu_offload=False"
        )
    if getattr(config, "use_precision_aware_optimizer", False):
        dtypes = {
            name: getattr(config, name, torch.float32)
            for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
        }
        for name, dtype in dtypes.items():
            if dtype not in _UNSCALED:
                return (
                    f"checkpointless cannot take along the scales of an optimizer's state in {dtype}: "
                    f"set {name} to torch.float32 or torch.bfloat16"
                )
    return None


class NotedNorms:
    """Records the gradient norm and the zero count that one Megatron optimizer computes from its final gradients.

    What is not computed or counted is what Megatron then returns: None, 0.0 or 0.
    """

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        # Megatron returns these values if it is not asked for the norm and the zero count.
        self._not_asked = (0.0, 0) if isinstance(optimizer, MixedPrecisionOptimizer) else (None, None)
        self.grad_norm: float | None = None
        self.num_zeros: float | None = None
        for name in ("get_grad_norm", "clip_grad_norm"):
            setattr(optimizer, name, self._noting(getattr(optimizer, name), "grad_norm"))
        optimizer.count_zeros = self._noting(optimizer.count_zeros, "num_zeros")

    def forget(self) -> None:
        """Forget the recorded values, because a new step begins."""
        self.grad_norm, self.num_zeros = self._not_asked

    def _noting(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            value = function(*args, **kwargs)
            setattr(self, name, value)
            return value

        return noting


class GuardedUpdate:
    """Replacement for ``prepare_grads`` and ``step_with_ready_grads`` of one (chained) Megatron optimizer.

    Args:
        models: the model's chunks, as Megatron's ``DistributedDataParallel`` wraps them.

    Raises:
        UnrecoverableError: the update cannot be guarded; the message says what to set.

    Attributes:
        overflow: whether the gradients of the step in progress overflow, so that nothing is to be applied.
    """

    def __init__(self, optimizer: MegatronOptimizer, models: Iterable[Any], guard: UpdateGuard) -> None:
        reason = _unguardable(optimizer, models)
        if reason is not None:
            raise UnrecoverableError(reason)
        self.overflow = False
        self._optimizers = sub_optimizers(optimizer)
        self._guard = guard
        self._prepare_grads: Callable[[], bool] = optimizer.prepare_grads
        optimizer.prepare_grads = self.prepare_grads
        optimizer.step_with_ready_grads = self

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Make the gradients final, and return whether they overflow; then all ranks commit a step that applies
        nothing.
        """
        self.overflow = bool(self._prepare_grads())
        if self.overflow:
            self._guard(lambda: True)
        return self.overflow

    @torch.no_grad()
    def __call__(self) -> bool:
        """Vote, apply the update and gather the parameters."""
        succeeded = self._guard(lambda: update_locally(self._optimizers))
        gather_parameters(self._optimizers)
        return succeeded


# --- Parameters that Megatron keeps in FP8 (``fp8_param_gather``) -------------------------------------------------
#
# Such a parameter is a tensor of TransformerEngine's that has no storage of its own: it shows 16 bits, and keeps
# bytes and scales side by side. It is never held or sent. Like a 16-bit parameter it is derived from the main
# parameters of all ranks, to the same bits: quantising depends on them, and with delayed scaling on the scales,
# which are buffers (:mod:`checkpointless.integrations.megatron.state`).
#
# Megatron quantises inside the update, but agrees with the other ranks on the largest values meanwhile. Under the
# lock of an update a rank must not wait for another one. So quantising is separated from the update, and is done
# before the gather.

# What Megatron-core 0.15 and 0.16 ask for the parameters to quantise; while it is replaced, there are none.
_COLLECT = "_get_fp8_params_and_shard_fp32_from_fp8"


def fp8_parameters(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """Return the parameters of ``modules`` that are kept in FP8."""
    return [parameter for module in modules for parameter in module.parameters() if is_float8tensor(parameter)]


def _is_quantized(optimizer: object) -> bool:
    """Return whether a Megatron optimizer updates parameters that are kept in FP8."""
    return (
        isinstance(optimizer, DistributedOptimizer)
        and not optimizer.is_stub_optimizer
        and any(buffer.param_dtype is torch.uint8 for buffer in optimizer.buffers)
    )


@contextmanager
def left_as_they_are(optimizer: DistributedOptimizer) -> Iterator[None]:
    """Keep an optimizer from quantising, which needs all ranks, while it copies main parameters to the model."""
    if not _is_quantized(optimizer):
        yield
        return
    setattr(optimizer, _COLLECT, lambda: ([], [], []))
    try:
        yield
    finally:
        delattr(optimizer, _COLLECT)


def _quantize(optimizers: Sequence[object]) -> None:
    """Quantise the main parameters of all ranks into the parameters that are kept in FP8. This is a collective.

    It may be repeated: the same main parameters and scales give the same bytes. Parameters in 16 bits are copied
    once more, too, because Megatron does both at once.
    """
    for optimizer in optimizers:
        if _is_quantized(optimizer):
            assert isinstance(optimizer, DistributedOptimizer)
            optimizer._copy_main_params_to_model_params()


def _unsupported_optimizer(optimizer: object, recipe: str) -> str | None:
    """Return why parameters in FP8 cannot be recovered exactly with one unchained optimizer, and what to set."""
    if getattr(getattr(optimizer, "config", None), "use_precision_aware_optimizer", False):
        return (
            "checkpointless cannot derive parameters in FP8 from a precision-aware optimizer: "
            "set use_precision_aware_optimizer=False or fp8_param_gather=False"
        )
    if not isinstance(optimizer, DistributedOptimizer):
        return (
            "checkpointless recovers parameters in FP8 from the distributed optimizer only: "
            "set use_distributed_optimizer=True or fp8_param_gather=False"
        )
    if not hasattr(DistributedOptimizer, _COLLECT):
        return (
            "checkpointless does not know how this Megatron-core quantises parameters in FP8: "
            "set fp8_param_gather=False"
        )
    if recipe == DELAYED and getattr(optimizer, "grad_scaler", None) is not None:
        return (
            "checkpointless cannot take along parameters in FP8 whose scale changes in a step that is skipped: "
            "set loss_scale=None, fp8_recipe='tensorwise' or fp8_param_gather=False"
        )
    if any(is_float8tensor(each) for group in optimizer.param_groups for each in group["params"]):
        return (
            "checkpointless cannot derive parameters in FP8 that have no main parameters: set params_dtype to "
            "torch.bfloat16 or fp8_param_gather=False"
        )
    return None
