"""Trace the block with VizTracer, if that was requested."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from checkpointless.environment import RANK_ENV


class Tracing:
    """Writes one VizTracer file per rank and generation."""

    @staticmethod
    def require() -> None:
        """Check that viztracer is installed.

        Raises:
            ValueError: viztracer is not installed.
        """
        if importlib.util.find_spec("viztracer") is None:
            raise ValueError("trace_file_path needs VizTracer: pip install viztracer")

    @contextmanager
    def __call__(self, path: str | None, generation: int) -> Iterator[None]:
        """Trace the body into ``path``, with rank and generation before its suffix; trace nothing if it is None."""
        if path is None:
            yield
            return
        from viztracer import VizTracer

        base = Path(path)
        name = f"{base.stem}-rank{os.environ.get(RANK_ENV, '0')}-generation{generation}{base.suffix or '.json'}"
        with VizTracer(output_file=str(base.with_name(name)), verbose=0):
            yield


tracing = Tracing()
