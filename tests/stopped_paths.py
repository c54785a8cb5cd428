"""Files of a disk that has stopped, for tests of who waits for it."""

import os
import time
from pathlib import Path


class StoppedPaths:
    """Lets nobody open the files from now on: whoever tries waits; what is there is kept."""

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        for path in paths:
            path.parent.mkdir(exist_ok=True)
            os.mkfifo(path.with_name(f"{path.name}.fifo"))
            if path.exists():
                os.link(path, path.with_name(f"{path.name}.kept"))
            os.rename(path.with_name(f"{path.name}.fifo"), path)

    def go_on(self) -> None:
        """Let the files be written again, and add to them what those who waited then write."""
        for path in self._paths:
            kept, fifo = path.with_name(f"{path.name}.kept"), path.with_name(f"{path.name}.fifo")
            if not kept.exists():
                kept.write_text("")
            os.link(path, fifo)
            os.rename(kept, path)  # whoever comes now finds the file
            reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
            writer = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
            data = b""
            quiet_at_s = time.monotonic() + 1.0
            while time.monotonic() < quiet_at_s:
                try:
                    data += os.read(reader, 1 << 16)
                except BlockingIOError:
                    time.sleep(0.01)
            os.close(writer)
            os.close(reader)
            with path.open("ab") as file:
                file.write(data)
