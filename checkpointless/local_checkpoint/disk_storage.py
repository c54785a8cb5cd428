"""A node's directory of part files: what it contains and what can be used. It knows nothing of other nodes."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpointless.local_checkpoint.content import Content
from checkpointless.local_checkpoint.part_file import PartName, part_world_size, read_part, verify_part, write_part
from checkpointless.local_checkpoint.part_id import PartId, SaveId
from checkpointless.local_checkpoint.part_storage import Shelf, StoredPart, usable

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredFile:
    """A copy of a part as a file.

    Attributes:
        path: the file.
    """

    path: Path

    def verify(self) -> None:
        """Verify the file (:func:`~checkpointless.local_checkpoint.part_file.verify_part`)."""
        verify_part(self.path)

    def read(self) -> Content:
        """Read the file (:func:`~checkpointless.local_checkpoint.part_file.read_part`)."""
        return read_part(self.path)


class DiskStorage:
    """The part files in one directory, which the ranks of a node share.

    It is a :class:`~checkpointless.local_checkpoint.part_storage.PartStorage`. A file that is damaged or cannot be
    read counts as missing, with a warning.

    Args:
        root: the directory, which is made if it does not exist, now and at each write: scratch may be purged.

    Raises:
        OSError: the directory cannot be made, or other users can write to it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._make()

    def _make(self) -> None:
        """Make the directory, for this user only, if it does not exist."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = self.root.stat()
        if about.st_uid != os.geteuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(
                f"{self.root} can be changed by other users, and checkpoints with it: "
                "give a directory of your own, or chmod 700 it"
            )

    def write(self, parts: Sequence[tuple[PartId, Content]], holder: int, world_size: int) -> None:
        """Write parts: this rank's own and those of other ranks.

        Raises:
            OSError: a part could not be written, or the disk has no room for it; nothing is left of that part.
        """
        self._make()
        needed, about = sum(content.nbytes for _, content in parts), os.statvfs(self.root)
        if needed > about.f_bavail * about.f_frsize:
            free = about.f_bavail * about.f_frsize
            raise OSError(errno.ENOSPC, f"{needed} bytes are needed and {free} are free", str(self.root))
        for part, content in parts:
            write_part(self.root, PartName(part, holder, finished=True), world_size, content)

    def delete(self, save: SaveId) -> None:
        """Delete all files, also unfinished ones, of one save."""
        self._delete(lambda each: each == save)

    def delete_all_but(self, keep: Collection[SaveId | None]) -> None:
        """Delete all files, also unfinished ones, of saves not in ``keep``. A node's ranks share the work."""
        self._delete(lambda each: each not in keep)

    def _delete(self, is_meant: Callable[[SaveId], bool]) -> None:
        try:
            for name, path in self._files():
                if is_meant(name.id.save):
                    path.unlink(missing_ok=True)
        except OSError as error:  # there may still be room for the next save; if not, its write raises
            logger.warning("an old local checkpoint cannot be deleted: %s", error)

    def shelf(self, holder: int, world_size: int) -> Shelf:
        """Return the files that are whole by their seal, by save and part, whichever rank wrote them.

        After a node was replaced, a rank may find its part under another rank's name.

        Args:
            holder: this rank; the files that it wrote come first.
            world_size: the number of ranks; parts of a job with another number are left out.

        Raises:
            OSError: the directory cannot be read.
        """
        shelf: dict[SaveId, dict[int, list[StoredPart]]] = defaultdict(lambda: defaultdict(list))
        files = [(name, path) for name, path in self._files() if name.finished]
        for name, path in sorted(files, key=lambda file: (file[0].holder != holder, file[0].holder)):
            if usable(part_world_size, path) == world_size:
                shelf[name.id.save][name.id.part].append(StoredFile(path))
        return shelf

    def _files(self) -> Iterator[tuple[PartName, Path]]:
        """Yield all part files in the directory; none if the directory is gone."""
        try:
            paths = sorted(self.root.iterdir())
        except FileNotFoundError:
            return
        for path in paths:
            name = PartName.parse(path.name)
            if name is not None:
                yield name, path
