"""Drops what NeMo and Lightning would keep in their modules over a restart: patches, log files, telemetry."""

from __future__ import annotations

import inspect
import logging
import sys
from typing import Any

from lightning.pytorch.loops import evaluation_loop, fit_loop, prediction_loop
from nemo.utils import lightning_logger_patch
from nemo.utils import logging as nemo_logging
from nemo.utils.formatters.base import BaseNeMoFormatter

from checkpointless.inprocess.finalize import register_cleanup

logger = logging.getLogger(__name__)
_installed: list[bool] = []
_of_the_user: set[logging.Handler] = set()  # log files that were open before the first trainer


def install() -> None:
    """Have NeMo's patches undone, its log files closed and its spans ended at every restart. Idempotent."""
    if not _installed:
        _installed.append(True)
        _of_the_user.update(_log_files())
    register_cleanup("nemo", unwrap_data_fetchers)
    register_cleanup("log files", close_log_files)
    register_cleanup("one_logger", end_spans)


def close_log_files() -> None:
    """Close the files that NeMo has loggers write to: every trainer opens new ones, and NeMo never closes them."""
    ours = _log_files() - _of_the_user
    for known in (nemo_logging._handlers, lightning_logger_patch.HANDLERS):
        for name in [name for name, handler in known.items() if handler in ours]:
            del known[name]
    for handler in ours:
        for each in _loggers():
            each.removeHandler(handler)
        handler.close()


def _loggers() -> tuple[logging.Logger, ...]:
    """Return NeMo's logger, Megatron's, to which NeMo adds its own handlers, and Lightning's."""
    return nemo_logging._logger, logging.getLogger("megatron.core"), lightning_logger_patch.pl._logger


def _log_files() -> set[logging.Handler]:
    """Return the handlers that NeMo has made and that write to files."""
    known = lightning_logger_patch.HANDLERS.values()
    return {
        handler
        for each in _loggers()
        for handler in each.handlers
        if isinstance(handler, logging.FileHandler)
        and (isinstance(handler.formatter, BaseNeMoFormatter) or handler in known)
    }


def unwrap_data_fetchers() -> None:
    """Remove the wrapper that NeMo's strategy puts around Lightning's fetcher selection at every set-up.

    NeMo wraps the module's function anew each time, so the call stack would grow by one level per generation.
    """
    for module in (fit_loop, evaluation_loop, prediction_loop):
        module._select_data_fetcher = inspect.unwrap(module._select_data_fetcher)  # type: ignore[attr-defined]


# --- OneLogger, the telemetry that NeMo starts on rank 0 ----------------------------------------------------------
#
# If a span of training (``nv_one_logger.training_telemetry``) is still active when the block is entered again, the
# next start of the same span is an error, which OneLogger by default raises in the middle of training.


def end_spans() -> None:
    """End every active span of training. If that is not possible, OneLogger is switched off."""
    module = sys.modules.get("nv_one_logger.api.one_logger_provider")
    if module is None:
        return
    provider = module.OneLoggerProvider.instance()
    if not provider.one_logger_enabled:
        return
    try:
        _end_spans(provider.recorder)
    except Exception as error:  # noqa: BLE001 - telemetry must not keep training from going on
        logger.warning("OneLogger is switched off, since its spans could not be ended: %s", error)
        provider.force_disable_logging()


def _end_spans(recorder: Any) -> None:
    from nv_one_logger.training_telemetry.api.spans import StandardTrainingJobSpanName

    active = [span for name in StandardTrainingJobSpanName for span in recorder.get_active_spans_by_name(name)]
    for span in sorted(active, key=_depth, reverse=True):
        recorder.stop(span)
    for timer in recorder._training_state.multi_iteration_timers.values():
        if timer.is_active:  # it was started for a span that did not exist yet
            timer.stop()


def _depth(span: Any) -> int:
    return 0 if span.parent_span is None else 1 + _depth(span.parent_span)
