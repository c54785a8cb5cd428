"""Ends the spans of OneLogger, the telemetry that NeMo starts on rank 0, with the generation that they belong to.

If a span of training (``nv_one_logger.training_telemetry``) is still active when the block is entered again, the
next start of the same span is an error, which OneLogger by default raises in the middle of training.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from checkpointless.inprocess.finalize import register_cleanup

logger = logging.getLogger(__name__)


def install() -> None:
    """Register the ending of OneLogger's spans at every restart of this process. Idempotent."""
    register_cleanup("one_logger", end_spans)


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
