"""The sockets through which worker processes hand descriptors to the process that started them.

A process makes them in a temporary folder of its own, unless the one that started it had such a folder already:
then all of them are in that one, where they can be found when their makers were killed.
"""

from __future__ import annotations

import contextlib
from multiprocessing import util
from pathlib import Path

_BOUND = Path("/proc/net/unix")  # proc_net(5): the last field is the path that a socket is bound to


def share_folder() -> None:
    """Have the processes that this one starts from now on make their sockets in its own folder."""
    util.get_temp_dir()


def remove_unused() -> None:
    """Remove the sockets in this process's folder whose makers have ended.

    Raises:
        OSError: the kernel does not tell which sockets are bound.
    """
    found = [str(path) for path in Path(util.get_temp_dir()).glob("listener-*")]
    if not found:
        return
    bound = {line.rpartition(" ")[2] for line in _BOUND.read_text(errors="surrogateescape").splitlines()}
    for path in found:
        if path not in bound:
            with contextlib.suppress(FileNotFoundError):
                Path(path).unlink()
