"""Test that Xids are collected on, though the process that waits for them ends."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from typing import Any

import pytest

from checkpointless.devices import xids
from checkpointless.devices.xids import XidCollector


def test_a_process_that_cannot_be_started_again_now_is_tried_the_next_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    popen, says = subprocess.Popen, [1, None, 2, 3]

    def start(_: object, **options: Any) -> subprocess.Popen[bytes]:
        """Start a process that says one Xid and ends, or none."""
        xid = says.pop(0)
        if xid is None:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        line = f'{{"uuid": "GPU-0", "xid": {xid}}}'
        return popen([sys.executable, "-c", f"print({line!r})"], **options)

    monkeypatch.setattr(xids.subprocess, "Popen", start)
    collector = XidCollector()
    collector._process.wait(60)
    assert collector.found() == {("GPU-0", 1)}
    assert "Xids are not collected now: [Errno 11] Resource temporarily unavailable" in caplog.text
    assert collector.found() == {("GPU-0", 1)}
    collector._process.wait(60)
    assert collector.found() == {("GPU-0", 1), ("GPU-0", 2)}
    collector.close()
