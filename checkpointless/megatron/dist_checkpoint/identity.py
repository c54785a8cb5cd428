"""Which save a checkpoint directory is the result of, so that copies of another one are never taken for it.

A small file lies beside Megatron's own. It names the save and the directory, and holds size and time of Megatron's
``.metadata``. If anybody writes another checkpoint into the directory, or moves it, the file says nothing any more,
and everything comes from storage.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpointless.local_checkpoint.part_id import SaveId

if TYPE_CHECKING:
    from checkpointless.wire.plain import Json, Parsed

logger = logging.getLogger(__name__)

FILE = "checkpointless.json"
_METADATA = ".metadata"  # what torch writes last of the chunks
_VERSION = 1


@dataclass(frozen=True)
class Identity:
    """The save that a checkpoint is the result of.

    Attributes:
        save: the save.
        name: the names of the checkpoint's directory and of the one around it.
        world_size: how many ranks saved.
    """

    save: SaveId
    name: str
    world_size: int

    def to_json(self) -> list[Json]:
        """Return the identity as plain data."""
        return [str(self.save), self.name, self.world_size]

    @classmethod
    def from_json(cls, data: Parsed) -> Identity:
        """Return the identity that :meth:`to_json` encoded.

        Raises:
            ValueError: the data are no identity.
        """
        try:
            save, name, world_size = data
            return cls(SaveId.parse(save), str(name), int(world_size))
        except TypeError as error:
            raise ValueError(f"no identity: {error}") from error


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
    about = {"version": _VERSION, "identity": identity.to_json(), "metadata": _stamp(folder)}
    unfinished = folder / f".{FILE}.tmp"
    unfinished.write_text(json.dumps(about))
    os.replace(unfinished, folder / FILE)


def read(checkpoint_dir: str | os.PathLike[str]) -> Identity | None:
    """Return the identity of a checkpoint; None if it has none that holds, with a warning if it had one."""
    folder = Path(checkpoint_dir)
    if not is_local(checkpoint_dir):
        return None
    try:
        about: Any = json.loads((folder / FILE).read_text())
        if about["version"] != _VERSION:
            raise ValueError(f"it is of version {about['version']}")
        identity = Identity.from_json(about["identity"])
        if about["metadata"] != _stamp(folder) or identity.name != name_of(folder):
            raise ValueError("it is of another checkpoint")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is not used, and no copies are: %s", folder / FILE, error)
        return None
    return identity


def _stamp(folder: Path) -> list[int]:
    about = (folder / _METADATA).stat()
    return [about.st_size, about.st_mtime_ns]
