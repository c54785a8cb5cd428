"""The sockets through which worker processes pass descriptors to the process that started them.

A process creates its sockets in a private temporary folder, unless the process that started it already had one:
then all sockets are in that folder, where they can be found after the processes that created them were killed.
"""

from __future__ import annotations

import contextlib
import logging
from multiprocessing import util
from pathlib import Path

logger = logging.getLogger(__name__)

_BOUND = Path("/proc/net/unix")  # unix(7): the eighth field is the path that a socket is bound to


def share_folder() -> None:
    """Make the processes that this one starts from now on create their sockets in this process's folder."""
    try:
        util.get_temp_dir()
    except OSError as error:  # data loaders with workers report it, too; others need no folder
        logger.warning("no temporary folder for sockets of data-loader workers: %s", error)


def remove_unused() -> None:
    """Remove the sockets in this process's folder whose creators have ended.

    Raises:
        OSError: there is no temporary folder, or the kernel does not report which sockets are bound.
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
