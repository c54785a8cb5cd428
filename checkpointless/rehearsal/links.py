"""A working directory of its own for each job, in which everything is found that is in the user's."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

_MOST_ENTRIES = 20_000


def linked_folder(folder: Path, at: Path, most: int = _MOST_ENTRIES) -> Path:
    """Make a folder that looks like ``folder``, also on the way up, and takes what is newly written itself.

    Folders in it are real, and files are links, so that a new file is never in the user's folder. A path such as
    ``../data`` leads to the user's data. Hidden folders, and those beyond a limit, are links as a whole.

    Args:
        folder: the user's working directory.
        at: where to make it; the path of ``folder`` is appended.
        most: the largest number of entries that are made; what lies deeper is linked as a whole.

    Returns:
        The path of the new folder.
    """
    folder, at = folder.resolve(), at.resolve()
    twin = Path(f"{at}{folder}")
    twin.mkdir(parents=True)
    for parent, child in zip(folder.parents, [folder, *folder.parents]):
        for entry in _entries(parent):
            if entry.name != child.name:
                (Path(f"{at}{parent}") / entry.name).symlink_to(entry.path)
    made, due = 0, deque([folder])
    while due:
        source = due.popleft()
        for entry in _entries(source):
            made += 1
            there = Path(f"{at}{source}") / entry.name
            is_inner = entry.is_dir(follow_symlinks=False) and not entry.name.startswith((".", "__"))
            if is_inner and made < most and Path(entry.path) != at and Path(entry.path) not in at.parents:
                there.mkdir()
                due.append(Path(entry.path))
            else:
                there.symlink_to(entry.path)
    return twin


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return what is in a folder; nothing if it may not be read."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []
