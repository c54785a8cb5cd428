"""Drops what NeMo and Lightning would keep in their modules over a restart."""

from __future__ import annotations

import inspect
import logging

from lightning.pytorch.loops import evaluation_loop, fit_loop, prediction_loop
from nemo.utils import lightning_logger_patch
from nemo.utils import logging as nemo_logging
from nemo.utils.formatters.base import BaseNeMoFormatter

from checkpointless.inprocess.finalize import register_cleanup

_installed: list[bool] = []
_of_the_user: set[logging.Handler] = set()  # log files that were open before the first trainer


def install() -> None:
    """Have NeMo's module-level patches undone and its log files closed at every restart. Idempotent."""
    if not _installed:
        _installed.append(True)
        _of_the_user.update(_log_files())
    register_cleanup("nemo", unwrap_data_fetchers)
    register_cleanup("log files", close_log_files)


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
