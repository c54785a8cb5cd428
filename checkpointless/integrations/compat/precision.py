"""The precisions of training that can be recovered exactly."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from checkpointless.system.environment import SPINNING_KERNELS_ENV, YES

DELAYED = "delayed"  # the recipe of FP8 that keeps scales from step to step
_NOT_IN_A_LOOP = "PlainTraining does not take along parameters in FP8: keep them in 16 bits (fp8_param=False)"


def unsupported(config: object) -> str | None:
    """Return in one line why a training with this configuration is not exact, and what to set; or None."""
    return next(_obstacles(config), None)


def _obstacles(config: object) -> Iterator[str]:
    def is_set(name: str) -> bool:
        return bool(getattr(config, name, None))

    if is_set("fp4"):
        yield "checkpointless has not been proved with FP4 training: set fp4=None"
    if not is_set("fp8"):
        return
    recipe, known = fp8_recipe(config), (DELAYED, "tensorwise", "blockwise", "mxfp8")
    skips = is_set("fp16") or str(getattr(config, "precision", "")).startswith("16")
    for name in filter(is_set, ("fp8_param", "fp8_params", "fp8_param_gather")):
        if recipe == "mxfp8":
            yield (
                "checkpointless has not been proved with parameters in MXFP8, which are gathered through the "
                f"memory of gradients: set {name}=False or fp8_recipe='tensorwise'"
            )
        if skips and recipe == DELAYED:
            yield (
                "checkpointless cannot take along parameters in FP8 whose scale changes in a step that is skipped: "
                f"set {name}=False or fp8_recipe='tensorwise', or train in bf16"
            )
    for name in filter(is_set, ("fp8_dot_product_attention", "fp8_multi_head_attention")):
        yield f"checkpointless cannot take along the scales of attention in FP8: set {name}=False"
    if is_set("use_transformer_engine_op_fuser") and recipe == DELAYED:
        yield (
            "checkpointless does not find the FP8 scales of fused operations: "
            "set use_transformer_engine_op_fuser=False or fp8_recipe='tensorwise'"
        )
    if recipe not in known:
        yield (
            f"checkpointless does not know what the FP8 recipe {recipe!r} keeps: "
            f"set fp8_recipe to one of {', '.join(known)}"
        )


def unsupported_in_a_loop(modules: Iterable[object]) -> str | None:
    """Return in one line why a loop cannot be recovered with these modules and all their parts; or None."""
    for module in modules:
        config = getattr(module, "config", None)
        reason = unsupported(config)
        if reason is not None:
            return reason
        if getattr(config, "fp8", None) and getattr(config, "fp8_param", None):
            return _NOT_IN_A_LOOP
        if any(hasattr(parameter, "_quantizer") for parameter in vars(module).get("_parameters", {}).values()):
            return _NOT_IN_A_LOOP  # TransformerEngine's own modules, made in fp8_model_init
        if getattr(config, "fp8", None) and fp8_recipe(config) == DELAYED:
            return "PlainTraining does not take along the scales of FP8: set fp8_recipe='tensorwise'"
    return None


def fp8_recipe(config: object) -> str:
    """Return the name of the recipe of FP8 training; Megatron's default if none is set."""
    recipe = getattr(config, "fp8_recipe", None) or DELAYED
    return str(getattr(recipe, "value", recipe))


# --- Kernels in which a GPU waits for its peers where no abort of a communicator reaches it ---------------------

#: What a config asks such kernels with: the option, the values that do, whose kernels they are, and what to set.
_ASKED_WITH = (
    ("tp_comm_overlap", (True,), "TransformerEngine's user buffers", "tp_comm_overlap=False"),
    ("moe_enable_deepep", (True,), "DeepEP", "moe_enable_deepep=False, moe_token_dispatcher_type='alltoall'"),
    ("moe_token_dispatcher_type", ("flex",), "DeepEP or HybridEP", "moe_token_dispatcher_type='alltoall'"),
)


def unabortable(config: object) -> str | None:
    """Return in one line why a rank that waits for a lost one could not be freed, and what to set; or None.

    DeepEP's kernels and those of TransformerEngine's user buffers read flags in a loop that peers write over NVLink
    or RDMA. Aborting NCCL's communicators does not end them; they end the process when their own limit is over.
    After a death all ranks that wait in one would be lost, and with them the state.
    """
    if os.environ.get(SPINNING_KERNELS_ENV) == YES:
        return None
    for option, values, whose, instead in _ASKED_WITH:
        value = getattr(config, option, None)
        if isinstance(value, bool | str) and value in values:
            return (
                f"a rank that waits for a lost one in a kernel of {whose} cannot be freed, and its state is lost: "
                f"set {instead}, or {SPINNING_KERNELS_ENV}=1 to train nevertheless"
            )
    return None
