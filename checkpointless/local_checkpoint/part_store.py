"""A node's directory of part files: what it contains and what can be used. It knows nothing of other nodes."""

from __future__ import annotations

import logging
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from checkpointless.local_checkpoint.part_file import (
    Content,
    Generation,
    PartFileError,
    PartId,
    PartName,
    part_world_size,
    read_part,
    verify_part,
    write_part,
)

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
Shelf = Mapping[Generation, Mapping[int, Sequence[Path]]]


class PartStore:
    """The part files in one directory, which the ranks of a node share.

    A file that is damaged or cannot be read counts as missing, with a warning.

    Args:
        root: the directory, which is made if it does not exist.

    Raises:
        OSError: the directory cannot be made, or other users can write to it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.make()

    def make(self) -> None:
        """Make the directory, for this user only, if it does not exist.

        Raises:
            OSError: the directory cannot be made, or other users can write to it.
        """
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
            OSError: a part could not be written; nothing is left of that part.
        """
        for part, content in parts:
            write_part(self.root, PartName(part, holder, finished=True), world_size, content)

    def delete_all_but(self, keep: Collection[Generation | None]) -> None:
        """Delete all files, also unfinished ones, of generations not in ``keep``. A node's ranks share the work."""
        try:
            for name, path in self._files():
                if name.id.generation not in keep:
                    path.unlink(missing_ok=True)
        except OSError as error:  # there may still be room for the next save; if not, its write raises
            logger.warning("an old local checkpoint cannot be deleted: %s", error)

    def shelf(self, holder: int, world_size: int) -> Shelf:
        """Return the files that are whole by their seal, by generation and part, whichever rank wrote them.

        After a node was replaced, a rank may find its part under another rank's name.

        Args:
            holder: this rank; the files that it wrote come first.
            world_size: the number of ranks; parts of a job with another number are left out.

        Raises:
            OSError: the directory cannot be read.
        """
        shelf: dict[Generation, dict[int, list[Path]]] = defaultdict(lambda: defaultdict(list))
        files = [(name, path) for name, path in self._files() if name.finished]
        for name, path in sorted(files, key=lambda file: (file[0].holder != holder, file[0].holder)):
            if _usable(part_world_size, path) == world_size:
                shelf[name.id.generation][name.id.part].append(path)
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


def any_sound(paths: Sequence[Path]) -> bool:
    """Return whether one of the files, copies of one part, can be read to its end with every digest right."""

    def sound(path: Path) -> bool:
        verify_part(path)
        return True

    return any(_usable(sound, path) for path in paths)


def read_any(paths: Sequence[Path]) -> Content | None:
    """Return the content of the first undamaged file among copies of one part; None if there is none."""
    for path in paths:
        content = _usable(read_part, path)
        if content is not None:
            return content
    return None


def _usable(reader: Callable[[Path], _T], path: Path) -> _T | None:
    """Return what ``reader`` makes of the file, or None, with a warning, if the file cannot be used."""
    try:
        return reader(path)
    except FileNotFoundError:
        return None  # another rank of the node has just deleted what no rank needs any more
    except (OSError, PartFileError) as error:
        logger.warning("a local checkpoint is taken for missing: %s", error)
        return None
