"""Errors of single ranks in a save: they are noted, and the rank goes on to where all ranks learn of them.

Some files of a checkpoint are written by one rank while the others wait for it in a collective. If that rank raised
there, the others would wait until the job was interrupted.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from nemo.lightning.ckpt_utils import WEIGHTS_PATH, ckpt_to_dir
from nemo.lightning.io.pl import TrainerContext
from nemo.lightning.pytorch.callbacks import ModelCheckpoint

from checkpointless.patches import Patch, Patches
from checkpointless.strategies.checkpoints.space import Mounts, is_full
from checkpointless.strategies.checkpoints.writers import write_buckets

#: A full disk makes torch.save raise a RuntimeError.
STORAGE_ERRORS = (OSError, RuntimeError)


def folder_of(path: str | Path) -> str:
    """Return the folder of the checkpoint that ``path`` names, whose weights or whose context ``path`` may be."""
    folder = Path(ckpt_to_dir(path))
    return str(folder.parent if folder.name in (WEIGHTS_PATH, "context") else folder)


class SaveErrors:
    """What went wrong on this rank in saves that the other ranks do not know of yet, by the checkpoint's folder.

    Attributes:
        mounts: where the folders of checkpoints are mounted.
    """

    def __init__(self) -> None:
        self.mounts = Mounts()
        self._of: dict[str, str] = {}

    def note(self, path: str | Path, error: object) -> None:
        """Note an error in the save to ``path``; only the first is kept, because others follow from it."""
        self._of.setdefault(folder_of(path), " ".join(str(error).split()) or type(error).__name__)

    def take(self, path: str | Path) -> str:
        """Return what went wrong in the save to ``path``, and forget it; "": nothing."""
        return self._of.pop(folder_of(path), "")


@contextmanager
def tolerant_writes(errors: SaveErrors) -> Iterator[None]:
    """While the context lasts, ranks that fail to write a file of a checkpoint note it and go on.

    Args:
        errors: where the errors are noted.
    """
    patches = Patches()
    where: dict[str, Callable[..., str | Path]] = {
        "save_common": lambda strategy, state, checkpoint_dir: checkpoint_dir,
        "save_config": lambda config, checkpoint_dir: checkpoint_dir,
        "finish": lambda writer, *_: writer.checkpoint_dir,
    }

    def noting(name: str) -> Callable[[Any], Any]:
        return lambda original: _noting(original, errors, where[name])

    why = "one rank writes it, and the others wait"
    patches.make(
        [
            Patch(TorchCommonSaveStrategy, "save_common", noting("save_common"), why),
            Patch(FileSystemWriterAsync, "finish", noting("finish"), why),
            Patch(serialization, "save_config", noting("save_config"), why),
            Patch(ModelCheckpoint, "set_checkpoint_unfinished_marker", lambda set_: _marking(set_, errors), why),
            Patch(TrainerContext, "io_dump", lambda dump: _dumping(dump, errors), "NeMo goes on without it"),
            Patch(
                FileSystemWriterAsync,
                "write_preloaded_data_multiproc",
                lambda _: staticmethod(write_buckets),
                "a writer that is killed is waited for for ever",
            ),
        ]
    )
    try:
        yield
    finally:
        patches.undo()


def _noting(original: Any, errors: SaveErrors, where: Callable[..., str | Path]) -> Any:
    def noted(*args: Any) -> None:
        try:
            original(*args)
        except STORAGE_ERRORS as error:
            folder = where(*args)
            full = isinstance(error, RuntimeError) and is_full(Path(folder))  # torch.save does not say so
            errors.note(folder, os.strerror(errno.ENOSPC) if full else error)

    return noted


def _marking(original: Any, errors: SaveErrors) -> Any:
    def mark(checkpoint_path: str | Path, barrier_after: bool = False) -> None:
        path = str(checkpoint_path)
        problem = errors.mounts.problem(Path(path).parent) if "://" not in path else ""
        try:
            if problem:
                errors.note(path, problem)
            else:
                original(checkpoint_path)
        except OSError as error:
            errors.note(path, error)
        if barrier_after and dist.is_initialized():
            dist.barrier()

    return staticmethod(mark)


def _dumping(original: Any, errors: SaveErrors) -> Any:
    def dump(context: Any, output: Path, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(context, output, *args, **kwargs)
        except OSError as error:
            errors.note(output, error)
            raise

    return dump
