"""Drops what NeMo and Lightning would keep in their modules over a restart: patches, log files, telemetry."""

from __future__ import annotations

import enum
import functools
import inspect
import logging
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.loops import evaluation_loop, fit_loop, prediction_loop
from nemo.utils import lightning_logger_patch
from nemo.utils import logging as nemo_logging
from nemo.utils.formatters.base import BaseNeMoFormatter

from checkpointless.inprocess import HPCallWrapper, active_call_wrapper
from checkpointless.inprocess.finalize import register_cleanup
from checkpointless.inprocess.wrap import emit_event
from checkpointless.integrations.megatron.warm import fingerprints
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.system.patches import Patch, Patches
from checkpointless.transfer.exchange import true_on_all

logger = logging.getLogger(__name__)
_installed: list[bool] = []
_of_the_user: set[logging.Handler] = set()  # log files that were open before the first trainer


def install() -> None:
    """Have NeMo's patches undone, its log files closed and its telemetry ended at every restart. Idempotent."""
    if not _installed:
        _installed.append(True)
        _of_the_user.update(_log_files())
    register_cleanup("nemo", _unwrap_data_fetchers)
    register_cleanup("log files", _close_log_files)
    register_cleanup("one_logger", _switch_off_one_logger)


def _close_log_files() -> None:
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
    known = lightning_logger_patch.HANDLERS.values()
    return {
        handler
        for each in _loggers()
        for handler in each.handlers
        if isinstance(handler, logging.FileHandler)
        and (isinstance(handler.formatter, BaseNeMoFormatter) or handler in known)
    }


def _unwrap_data_fetchers() -> None:
    """Remove the wrapper that NeMo puts around Lightning's fetcher selection at every set-up once more."""
    for module in (fit_loop, evaluation_loop, prediction_loop):
        module._select_data_fetcher = inspect.unwrap(module._select_data_fetcher)  # type: ignore[attr-defined]


# --- OneLogger, the telemetry that NeMo starts on rank 0 ----------------------------------------------------------
#
# If a span of training (``nv_one_logger.training_telemetry``) is still active when the block is entered again, the
# next start of the same span is an error, which OneLogger by default raises in the middle of training.


def _switch_off_one_logger() -> None:
    module = sys.modules.get("nv_one_logger.api.one_logger_provider")
    if module is not None:
        module.OneLoggerProvider.instance().force_disable_logging()


# --- Megatron's datasets, built once by a process that lives through a fault --------------------------------------
#
# Indices over a large corpus take seconds to minutes. Megatron's datasets follow from the builder's arguments alone
# (``blended_megatron_dataset_builder.py`` of Megatron-core 0.12 to 0.16), and nothing writes to them later.

_PLAIN = (bool, int, float, str, bytes, type(None), enum.Enum, type)
_WHY = "a survivor of a fault gets the datasets that it has built already"
_patches = Patches()


@dataclass
class _Built:
    arguments: object
    datasets: list[Any]
    generation: int


_built: weakref.WeakKeyDictionary[HPCallWrapper, list[_Built]] = weakref.WeakKeyDictionary()


def cache_megatron_datasets() -> None:
    """Have Megatron's dataset builder return what it has built from equal arguments, if every rank has it."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

    if not _patches.are_made:
        _patches.make([Patch(BlendedMegatronDatasetBuilder, "build", _cached, _WHY)])


def _cached(original: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
    @functools.wraps(original)
    def build(builder: Any) -> list[Any]:
        call = active_call_wrapper()
        if call is None:
            return original(builder)
        began_s, generation = time.monotonic(), call.generation
        config = {name: _described(each) for name, each in vars(builder.config).items()}
        arguments = fingerprints({**config, "builder": (builder.cls, builder.sizes, type(builder.config))})
        kept = [each for each in _built.get(call, []) if each.generation >= generation - 1]
        found = next((each for each in kept if each.arguments == arguments), None)
        if generation > 0:
            is_kept = true_on_all(found is not None)
            why = {} if is_kept else {"reason": "other arguments" if found is None and kept else "a new process"}
            emit_event(EventName.DATASETS, kept=is_kept, seconds=time.monotonic() - began_s, **why)
            if is_kept and found is not None:
                found.generation = generation
                return list(found.datasets)
        _built[call] = [each for each in kept if each is not found]
        del kept, found  # they need not stay in memory while others are built in their place
        datasets = original(builder)
        _built[call].append(_Built(arguments, list(datasets), generation))
        return datasets

    return build


def _described(value: object) -> object:
    """Return what describes a tokenizer, by whose identifiers Megatron names index files; else ``value`` itself."""
    identifiers = getattr(value, "unique_identifiers", None)
    if not isinstance(identifiers, Mapping):
        return value
    held = getattr(value, "__dict__", {})
    return type(value), identifiers, {name: each for name, each in held.items() if isinstance(each, _PLAIN)}
