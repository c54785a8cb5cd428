"""The abort that drops what TransformerEngine, if it was imported, keeps in globals across a restart."""

from __future__ import annotations

import sys
from typing import Any

from checkpointless.inprocess.abort.base import Abort
from checkpointless.inprocess.state import HPState

_FP8 = ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8")  # 2.8 and later; earlier
_MODULES = "transformer_engine.pytorch.module.base"
_ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention.utils"


class AbortTransformerEngine(Abort):
    """Drops what TransformerEngine keeps for process groups that are gone, once the main thread has left the block.

    TransformerEngine's FP8 state must not be reset while the block is inside ``fp8_autocast``, whose exit relies on
    it, and its communicators for overlapped tensor parallelism must not be dropped while kernels wait in them. This
    abort does nothing if TransformerEngine was not imported.
    """

    def __call__(self, state: HPState) -> None:
        """Do nothing, because nothing can be dropped while the block still runs."""

    def after_block(self, state: HPState) -> None:
        """Drop FP8 state, user buffers (``destroy_ub``) and workspaces."""
        drop()


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
