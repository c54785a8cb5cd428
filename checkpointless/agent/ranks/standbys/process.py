"""A standby in an interpreter of its own: ``python -m checkpointless.agent.ranks.standbys.process``.

It is used where ranks cannot be forked because a preloaded module sets up CUDA. A standby must not do so: it would
take memory of a device that others train on, and it does not know which device will be its own. So it tells which
import would, and ends; the next standby is made without that import, which is left to the script.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from checkpointless.agent.ranks.platforms import install_platform
from checkpointless.agent.ranks.preload import preload, prepare
from checkpointless.agent.ranks.rank_process import Script, die_with_parent, process_parser
from checkpointless.agent.ranks.standbys.place import SPOILED, become_rank, say, wait_for_place
from checkpointless.cuda_sign import INIT_SIGN, cuda_sign
from checkpointless.posix.background import low_priority


class CudaRefusedError(BaseException):
    """Something would have set up CUDA; no ``except Exception`` of an import hides it."""


class CudaGuard:
    """Keeps torch from setting up CUDA, and knows whether anything tried to or did."""

    def __init__(self) -> None:
        self._tried = False

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Have torch refuse to set up CUDA meanwhile. This imports torch."""
        cuda: Any = importlib.import_module("torch.cuda")
        before = cuda._lazy_init
        cuda._lazy_init = self._refuse
        try:
            yield
        finally:
            cuda._lazy_init = before

    @property
    def is_spoiled(self) -> bool:
        """Whether CUDA was, or should have been, set up. Having asked the driver for devices alone does no harm."""
        return self._tried or cuda_sign() not in ("", INIT_SIGN)

    def _refuse(self) -> None:
        self._tried = True
        raise CudaRefusedError("a standby must not set up CUDA")


def spoiling_import(names: Sequence[str], script: Script, guard: CudaGuard) -> str | None:
    """Import ``names``.

    Returns:
        The first name whose import sets up CUDA, or would; None if none does.
    """
    for name in names:
        with contextlib.suppress(CudaRefusedError):
            preload((name,), script)
        if guard.is_spoiled:
            return name
    return None


def main(arguments: Sequence[str] | None = None) -> None:
    """Import in the background what a rank needs, wait for its place, and run the script as this rank.

    Args:
        arguments: command-line arguments (default: those of this process).
    """
    parser = process_parser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--preload", default="")
    options = parser.parse_args(arguments)
    die_with_parent(options.parent)
    logging.basicConfig(level=logging.INFO, format="standby: %(message)s")
    os.set_inheritable(options.fd, False)
    connection = socket.socket(fileno=options.fd)
    guard = CudaGuard()
    with low_priority(), guard.holding():
        names = tuple(name for name in options.preload.split(",") if name)
        spoiled = spoiling_import(names, options.script, guard)
        if spoiled is not None:
            say(connection, SPOILED, name=spoiled)
            os._exit(0)
        if options.platform is not None:
            install_platform(options.platform)
        prepare(options.script)
        gc.collect()
        gc.freeze()  # what is loaded now is never garbage: collections in the rank need not scan it
    become_rank(wait_for_place(connection), options.script, options.temp_folder)


if __name__ == "__main__":
    main()
