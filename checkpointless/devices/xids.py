"""Collects the Xids that the driver reports while the agent runs, through a process that waits for them."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time

from checkpointless.devices.child import Lines, end
from checkpointless.devices.nvml_process import XIDS

logger = logging.getLogger(__name__)


class XidCollector:
    """Collects the Xids of all devices of this machine.

    Raises:
        OSError: the process that waits for them cannot be started.
    """

    def __init__(self) -> None:
        self._begin()
        self._found: set[tuple[str, int]] = set()

    def found(self) -> frozenset[tuple[str, int]]:
        """Return the UUID of the device and the number of each Xid so far, without waiting.

        A process that has ended by itself is started again.
        """
        for line in self._lines.until(time.monotonic()):
            said = json.loads(line)
            if "xid" in said:
                self._found.add((said["uuid"], said["xid"]))
        if self._lines.are_over:
            self.close()
            try:
                self._begin()
            except OSError as error:  # the next call tries again
                logger.warning("Xids are not collected now: %s", error)
        return frozenset(self._found)

    def _begin(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "checkpointless.devices.nvml_process", XIDS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._lines = Lines(self._process)

    def close(self) -> None:
        """End the process."""
        end(self._process)
