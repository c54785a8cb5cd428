"""Drop what NeMo and Lightning keep in modules over a restart."""

from __future__ import annotations

import inspect

from lightning.pytorch.loops import evaluation_loop, fit_loop, prediction_loop

from checkpointless.inprocess.finalize import register_cleanup


def install() -> None:
    """Have NeMo's module-level patches undone at every restart. Idempotent."""
    register_cleanup("nemo", unwrap_data_fetchers)


def unwrap_data_fetchers() -> None:
    """Undo the wrapper that NeMo's strategy puts around Lightning's fetcher selection at every set-up.

    It wraps the module's function anew each time, so that the call stack would grow by one level per generation.
    """
    for module in (fit_loop, evaluation_loop, prediction_loop):
        module._select_data_fetcher = inspect.unwrap(module._select_data_fetcher)  # type: ignore[attr-defined]
