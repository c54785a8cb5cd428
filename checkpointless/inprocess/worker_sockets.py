"""The sockets through which worker processes hand descriptors to the process that started them.

A process makes them in a temporary folder of its own, unless the one that started it had such a folder already:
then all of them are in that one, where they can be found when their makers were killed.
"""

from __future__ import annotations

import contextlib
import logging
from multiprocessing import util
from pathlib import Path

logger = logging.getLogger(__name__)

_BOUND = Path("/proc/net/unix")  # unix(7): the eighth field is the path that a socket is bound to


def share_folder() -> None:
    """Have the processes that this one starts from now on make their sockets in its own folder."""
    try:
        util.get_temp_dir()
    except OSError as error:  # data loaders with workers will say so, too; others need none
        logger.warning("no temporary folder for sockets of data-loader workers: %s", error)


def remove_unused() -> None:
    """Remove the sockets in this process's folder whose makers have ended.

    Raises:
        OSError: there is no temporary folder, or the kernel does not tell which sockets are bound.
    """
    found = [str(path) for path in Path(util.get_temp_dir()).glob("listener-*")]
    if not found:
        return
    lines = _BOUND.read_text(errors="surrogateescape").splitlines()
    bound = {fields[7] for fields in (line.split(maxsplit=7) for line in lines) if len(fields) == 8}
    for path in found:
        if path not in bound:
            with contextlib.suppress(FileNotFoundError):
                Path(path).unlink()
