"""Whether the last words of a process blame its device, and from when on the device is taken for bad."""

from __future__ import annotations

import re

#: How many processes in a row have to end so on one device. One such end is most often the fault of a program or of
#: a peer; a second one, of a fresh process, has nothing in common with the first but the device and the program,
#: and the program runs on all other devices, too.
FAILURES_LIMIT = 2

_BLAME = re.compile(
    r"CUDA error"  # torch, for every error of the runtime
    r"|CUDA driver error"
    r"|cuda:\d+ (?:is not healthy|did not synchronize)"  # our health check
    r"|uncorrectable (?:NVLink |ECC )error"
    r"|unhandled cuda error"  # NCCL
)


def blames_device(words: str) -> bool:
    """Return whether a reason, an exception's message or the end of a log speaks of an error of the device."""
    return _BLAME.search(words) is not None and "out of memory" not in words
