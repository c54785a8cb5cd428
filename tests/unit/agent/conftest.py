"""Provide what the tests of an agent share."""

import fcntl
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def stalled(tmp_path: Path) -> Iterator[Path]:
    """Give a program as on a file system that has stalled: whoever opens it waits, for the holder of its lease."""
    path = tmp_path / "stalled"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # it comes with the first who waits
    try:
        with path.open("rb") as file:
            try:
                fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            except OSError as error:
                pytest.skip(f"{tmp_path} has no leases: {error}")
            yield path
    finally:
        signal.signal(signal.SIGIO, before)
