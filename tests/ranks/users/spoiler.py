"""A callback that makes storage fail, or ends who writes to it, while a user's run saves."""

import errno
import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from tests.ranks.users.end import SPOILS_ENV, note, notes, run_dir

FILLER = "filler"
_LAST = "-last/"  # in the paths of the second of the two saves of a step, which are under way together


class Spoiler(pl.Callback):
    """Spoils the saves of the steps from ``FIRST`` to ``LAST``.

    The kinds are: ``full`` (rank 0 fills the file system), ``blocked`` (a file is where the folder was),
    ``writer`` (the process that writes rank 1's part dies), ``proxy`` (the process that a background save is
    handed to dies), ``rank`` (rank 1 is killed while its part is written), ``common`` (rank 0 is killed after it
    has written its common part) and ``alone`` (rank 1 alone raises before it has written). The last five happen
    once.
    """

    def __init__(self) -> None:
        asked = [each.split() for each in os.environ[SPOILS_ENV].split(",")]
        self.asked = [(how, int(first), int(last)) for how, first, last in asked]
        self.rank = int(os.environ["RANK"])

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step + 1
        for how, first, last in self.asked:
            spoils = first <= step <= last
            if how in _ONCE and spoils and not _done(how, self.rank):
                rank, spoil = _ONCE[how]
                if rank == self.rank:
                    spoil()
            if how in _STORAGE and self.rank == 0 and (spoils or step == last + 1):
                _STORAGE[how][0 if spoils else 1](run_dir() / "nemo")
        trainer.strategy.barrier()


def _fill(storage: Path) -> None:
    with (storage / FILLER).open("ab", buffering=0) as file:
        for size in (65536, 4096):
            try:
                while True:
                    file.write(b"\0" * size)
            except OSError:
                continue


def _empty(storage: Path) -> None:
    (storage / FILLER).unlink(missing_ok=True)


def _block(storage: Path) -> None:
    checkpoints = storage / "fit-0" / "checkpoints"
    if checkpoints.is_dir():
        checkpoints.rename(checkpoints.with_name("away"))
        checkpoints.touch()


def _unblock(storage: Path) -> None:
    checkpoints = storage / "fit-0" / "checkpoints"
    if checkpoints.is_file():
        checkpoints.unlink()
        checkpoints.with_name("away").rename(checkpoints)


_STORAGE: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "full": (_fill, _empty),
    "blocked": (_block, _unblock),
}


def _done(how: str, rank: int) -> bool:
    return any(each["how"] == how for each in notes(run_dir(), rank, "spoiled"))


def _once(how: str, kill: Callable[[], None]) -> None:
    if not _done(how, int(os.environ["RANK"])):
        note("spoiled", how=how)
        kill()


def _in_writer(how: str, victim: Callable[[], int]) -> None:
    write = FileSystemWriterAsync.write_preloaded_data

    def kills(*args: Any, **kwargs: Any) -> None:
        if _LAST not in args[2][0]:
            _once(how, lambda: os.kill(victim(), signal.SIGKILL))
        write(*args, **kwargs)
        if victim is os.getppid:
            time.sleep(0.3)

    FileSystemWriterAsync.write_preloaded_data = staticmethod(kills)


def _alone() -> None:
    preload = FileSystemWriterAsync.preload_tensors

    def loads(*args: Any) -> Any:
        _once("alone", Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
        return preload(*args)

    FileSystemWriterAsync.preload_tensors = staticmethod(loads)


def _common() -> None:
    save = TorchCommonSaveStrategy.save_common

    def dies(self: Any, *args: Any) -> None:
        save(self, *args)
        _once("common", lambda: os.kill(os.getpid(), signal.SIGKILL))

    TorchCommonSaveStrategy.save_common = dies


#: ``proxy`` is the parent of the writing process in a background save, ``rank`` in one that is made at once.
_ONCE: dict[str, tuple[int, Callable[[], None]]] = {
    "writer": (1, functools.partial(_in_writer, "writer", os.getpid)),
    "proxy": (1, functools.partial(_in_writer, "proxy", os.getppid)),
    "rank": (1, functools.partial(_in_writer, "rank", os.getppid)),
    "common": (0, _common),
    "alone": (1, _alone),
}
