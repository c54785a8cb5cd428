"""What is known of a save before it begins: its size, the space that is free, and whether storage is there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import is_main_replica

from checkpointless.telemetry import wording

_HARDLY_ANY = 4  # blocks


@dataclass(frozen=True)
class Outlook:
    """What a rank knows of a save that is about to begin.

    Attributes:
        problem: why it cannot write there; "": it knows of no reason.
        nbytes: bytes of the tensors that are written from this rank's state.
        free: bytes that are free on the file system; None: not known.
        shares: whether the rank sees what the first rank has written there.
    """

    problem: str = ""
    nbytes: int = 0
    free: int | None = None
    shares: bool = False

    def to_plain(self) -> dict[str, Any]:
        """Return the outlook as plain data."""
        return asdict(self)


def objections(outlooks: Sequence[Outlook]) -> Mapping[int, str]:
    """Return why a save must not begin, by rank; nothing if no rank knows a reason.

    The sum of all ranks' tensors is the least that is written. It is compared with the free space only if all ranks
    write to the same file system and know how much of it is free.

    Args:
        outlooks: by rank, what it knows.
    """
    problems = {rank: each.problem for rank, each in enumerate(outlooks) if each.problem}
    if problems:
        return problems
    free = [each.free for each in outlooks if each.free is not None and each.shares]
    if len(free) < len(outlooks):
        return {}
    needed, least = sum(each.nbytes for each in outlooks), min(free)
    if needed <= least:
        return {}
    return {free.index(least): f"it has at least {wording.size(needed)}, and {wording.size(least)} are free"}


def bytes_to_write(checkpoint: dict[str, Any]) -> int:
    """Return the bytes of those tensors of a sharded state that this rank alone gives to the checkpoint."""
    total = 0
    for each in nested_values(checkpoint):
        data, replica = getattr(each, "data", None), getattr(each, "replica_id", None)
        if isinstance(data, torch.Tensor) and replica is not None and is_main_replica(replica):
            total += data.numel() * data.element_size()
    return total


def free_bytes(folder: Path) -> int | None:
    """Return the bytes that this process may write to the file system of ``folder``.

    Returns:
        None if the file system does not tell, or if there are files in the folder, which will be written over.

    Raises:
        OSError: the folder cannot be looked at.
    """
    found = os.statvfs(folder)
    if not found.f_blocks or any(folder.iterdir()):
        return None
    return (found.f_bavail if os.geteuid() else found.f_bfree) * found.f_frsize


def is_full(folder: Path) -> bool:
    """Return whether hardly a block is free on the file system of ``folder``."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return False
    return bool(found.f_blocks) and found.f_bavail < _HARDLY_ANY


class Mounts:
    """On which mounts the folders of checkpoints were when they were first seen.

    A file system that is no longer mounted leaves an empty folder on the disk below. What is saved there is out of
    sight when the file system is mounted again, and may fill that disk.
    """

    def __init__(self) -> None:
        self._of: dict[Path, Path] = {}

    def see(self, folder: Path) -> None:
        """Note where ``folder``, which need not exist yet, is mounted, unless it was seen before."""
        if folder not in self._of:
            self._of[folder] = mount_of(folder)

    def problem(self, folder: Path) -> str:
        """Return what is wrong with the mount of ``folder``; "": nothing."""
        self.see(folder)
        mount = self._of[folder]
        return "" if os.path.ismount(mount) else f"{mount} is not mounted any more"


def mount_of(folder: Path) -> Path:
    """Return the nearest mount above ``folder``, or the folder itself if it is one."""
    path = Path(os.path.realpath(folder))
    while not os.path.ismount(path) and path != path.parent:
        path = path.parent
    return path
