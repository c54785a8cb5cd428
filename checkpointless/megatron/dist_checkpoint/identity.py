"""Which save a checkpoint directory is the result of, so that copies of another one are never taken for it.

A small file lies beside Megatron's own. It names the save and the directory, and holds size and time of Megatron's
``.metadata``. If anybody writes another checkpoint into the directory, or moves it, the file says nothing any more,
and everything comes from storage.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from checkpointless.replication.parts import SaveId

logger = logging.getLogger(__name__)

FILE = "checkpointless.json"
_METADATA = ".metadata"  # what torch writes last of the chunks
_VERSION = 1


class Identity(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The save that a checkpoint is the result of.

    Attributes:
        token: the name of the save.
        name: the names of the checkpoint's directory and of the one around it.
        world_size: how many ranks saved.
    """

    token: str
    name: str
    world_size: int

    @property
    def save(self) -> SaveId:
        """The save."""
        return SaveId.parse(self.token)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """What the file says: the identity, and size and time of ``.metadata``."""

    version: int
    identity: Identity
    metadata: list[int]


def name_of(checkpoint_dir: str | os.PathLike[str]) -> str:
    """Return the name of a checkpoint: its directory (which may be ``weights``) and the one around it."""
    return "/".join(Path(os.path.abspath(checkpoint_dir)).parts[-2:])


def is_local(checkpoint_dir: str | os.PathLike[str]) -> bool:
    """Return whether the directory is one of the file system, and no address of a remote store."""
    return "://" not in str(checkpoint_dir)


def write(identity: Identity, checkpoint_dir: str | os.PathLike[str]) -> None:
    """Write the identity of a checkpoint whose ``.metadata`` is written.

    Raises:
        OSError: it cannot be written.
    """
    folder = Path(checkpoint_dir)
    unfinished = folder / f".{FILE}.tmp"
    unfinished.write_bytes(msgspec.json.encode(_File(_VERSION, identity, _stamp(folder))))
    os.replace(unfinished, folder / FILE)


def read(checkpoint_dir: str | os.PathLike[str]) -> Identity | None:
    """Return the identity of a checkpoint; None if it has none that holds, with a warning if it had one."""
    folder = Path(checkpoint_dir)
    if not is_local(checkpoint_dir):
        return None
    try:
        about = msgspec.json.decode((folder / FILE).read_bytes(), type=_File)
        if about.version != _VERSION:
            raise ValueError(f"it is of version {about.version}")
        if about.metadata != _stamp(folder) or about.identity.name != name_of(folder):
            raise ValueError("it is of another checkpoint")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        logger.warning("%s is not used, and no copies are: %s", folder / FILE, error)
        return None
    return about.identity


def _stamp(folder: Path) -> list[int]:
    about = (folder / _METADATA).stat()
    return [about.st_size, about.st_mtime_ns]
