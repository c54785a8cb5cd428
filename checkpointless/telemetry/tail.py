"""Follow an event log while it is written: every line once, in bounded portions."""

from __future__ import annotations

import logging
from pathlib import Path

from checkpointless.telemetry.events import Event, parse_event

logger = logging.getLogger(__name__)

DEFAULT_PORTION_BYTES = 256 * 1024


class EventTail:
    """Reads what has been added to a file of events since the last look.

    The file is opened for each look and closed again. A line without its end is left for the next look; a file that
    became shorter is read from its start; one that is not there (yet) has no events.

    Args:
        path: the file.
        from_end: leave out what is in it already.
    """

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self.path = path
        self._offset = self._size() if from_end else 0

    def read(self, portion_bytes: int = DEFAULT_PORTION_BYTES) -> list[Event]:
        """The next events, in the order in which they were written.

        Args:
            portion_bytes: how much is read at the most. A line that is longer is left out.

        Raises:
            OSError: the file is there and cannot be read.
        """
        if self._size() < self._offset:
            self._offset = 0
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(portion_bytes)
        except FileNotFoundError:
            return []
        whole = data.rfind(b"\n") + 1
        if whole == 0 and len(data) == portion_bytes:
            logger.warning("%s: a line of more than %d bytes was left out", self.path, portion_bytes)
            whole = len(data)
        self._offset += whole
        events = []
        for line in data[:whole].splitlines():
            event = parse_event(line)
            if event is not None:
                events.append(event)
        return events

    def is_behind(self) -> bool:
        """Whether there is more to read."""
        return self._size() > self._offset

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0
