"""Whether the last words of a process blame its device, and from when on the device is taken for bad."""

from __future__ import annotations

import re

#: How many processes in a row have to end so on one device. One such end is most often the fault of a program or of
#: a peer; a second one, of a fresh process, has nothing in common with the first but the device and the program,
#: and the program runs on all other devices, too.
FAILURES_LIMIT = 2

#: What CUDA and NCCL say of hardware. An illegal access or a device assert is the fault of a program, and a device
#: that does not synchronise may wait for a peer that is lost.
_BLAME = re.compile(
    r"uncorrectable (?:ECC|NVLink) error"  # cudaErrorECCUncorrectable, cudaErrorNvlinkUncorrectable
    r"|GPU is lost|fallen off the bus"
    r"|no CUDA-capable device is detected"  # cudaErrorNoDevice
    r"|hardware stack error"  # cudaErrorHardwareStackError
)


def blames_device(words: str) -> bool:
    """Return whether a reason, an exception's message or the end of a log speaks of an error of the hardware."""
    return _BLAME.search(words) is not None
