"""Stands for fused kernels of routers, whose names Megatron looks up when it is imported; no test calls one."""

from typing import Any


def _unused(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("the stand-in for TransformerEngine has no fused kernels for routers")


fused_compute_score_for_moe_aux_loss = fused_moe_aux_loss = fused_topk_with_score_function = _unused
