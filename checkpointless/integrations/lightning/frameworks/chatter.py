"""Keeps the frameworks' messages about their set-up out of a restart: all were logged at the first start."""

from __future__ import annotations

import logging
import os
import warnings

from checkpointless.inprocess.finalize import register_cleanup
from checkpointless.observability.telemetry.log_level import asked_for_level

#: The first component of the names of the loggers that are silenced.
FAMILIES = (
    "nemo",
    "nemo_logger",
    "megatron",
    "lightning",
    "lightning_fabric",
    "pytorch_lightning",
    "nv_one_logger",
)
_FOLDERS = tuple(f"{os.sep}{family}{os.sep}" for family in ("nemo", "megatron", "lightning"))
_UNTRUE = (
    "You're resuming from a checkpoint that ended before the epoch ended"  # the position in the data is restored
)

_levels: dict[str, int] = {}  # the previous levels of the loggers that are quiet now
_names: tuple[int, list[str]] = (0, [])  # of the families' loggers, when there were so many of all kinds


def install() -> None:
    """Silence the frameworks from the end of each generation until training resumes in the next. Idempotent."""
    register_cleanup("chatter", quiet)


def quiet() -> None:
    """Let only the frameworks' warnings and errors through until :func:`speak`; with ``--log-level debug``, all."""
    if asked_for_level() == logging.DEBUG:
        return
    for name in FAMILIES:
        logging.getLogger(name)
    for name, each in _of_families().items():
        if each.level < logging.WARNING and (each.level != logging.NOTSET or name in FAMILIES):
            _levels.setdefault(name, each.level)
            each.level = logging.WARNING
    _levels_have_changed()
    logging.getLogger().addFilter(_is_ours)  # it is added once, however often this runs
    warnings.filterwarnings("ignore", message=_UNTRUE)


def speak() -> None:
    """Let everything through again that was let through before :func:`quiet`."""
    while _levels:
        name, level = _levels.popitem()
        logging.getLogger(name).level = level
    _levels_have_changed()
    logging.getLogger().removeFilter(_is_ours)


def _of_families() -> dict[str, logging.Logger]:
    """Return the frameworks' loggers by name."""
    global _names
    every: dict[str, object] = logging.root.manager.loggerDict  # type: ignore[assignment]
    if _names[0] != len(every):  # names are only ever added; there are 1,200 with NeMo
        _names = len(every), [name for name in every if name.partition(".")[0] in FAMILIES]
    return {name: each for name in _names[1] if isinstance(each := every[name], logging.Logger)}


def _levels_have_changed() -> None:
    """Have the frameworks' loggers ask for their levels again; ``setLevel`` would have all loggers do so."""
    for each in _of_families().values():
        each._cache.clear()  # type: ignore[attr-defined]


def _is_ours(record: logging.LogRecord) -> bool:
    """Return whether a message logged to the root logger itself is not one of the frameworks' set-up messages."""
    return record.levelno >= logging.WARNING or not any(folder in record.pathname for folder in _FOLDERS)
