"""What TransformerEngine, if it was imported, keeps in globals across a restart."""

from __future__ import annotations

import sys
from typing import Any

_FP8 = ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8")  # 2.8 and later; earlier
_MODULES = "transformer_engine.pytorch.module.base"
_ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention.utils"


def drop() -> None:
    """Reset FP8 state and drop the communicators of overlapped tensor parallelism, workspaces and cached tensors.

    This is idempotent. Without it, ``initialize_ub`` fails because communicators exist, and makes the workspace
    that it finds three times as large.
    """
    for name in _FP8:
        manager = getattr(sys.modules.get(name), "FP8GlobalStateManager", None)
        if manager is not None:
            manager.reset()
            break
    modules: Any = sys.modules.get(_MODULES)
    if modules is not None:
        if getattr(modules, "_ub_communicators", None) or getattr(modules, "_ub_initialized", False):
            modules.destroy_ub()
        if hasattr(modules, "_cublas_workspace"):
            modules._cublas_workspace = None
    _empty(_MODULES, "_multi_stream_cublas_workspace")
    _empty(_MODULES, "_dummy_wgrads")
    _empty(_ATTENTION, "_cu_seqlens_cache")


def _empty(module: str, cache: str) -> None:
    cached: dict[Any, Any] | list[Any] | None = getattr(sys.modules.get(module), cache, None)
    if cached is not None:
        cached.clear()
