"""Compare our wheel with the tree that it was built from; only the standard library is needed."""

from __future__ import annotations

import zipfile
from pathlib import Path

#: The folders of the tree that are installed, and below which name.
FOLDERS = {
    "checkpointless": "checkpointless",
    "callbacks": "checkpointless/callbacks",
    "recipes": "checkpointless/recipes",
    "strategies": "checkpointless/strategies",
}


def differing(wheel: Path, root: Path) -> list[str]:
    """Return the files of our wheel that are not those of a tree, or that one of the two lacks."""
    with zipfile.ZipFile(wheel) as archive:
        packed = {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
    there = {
        f"{name}/{path.relative_to(root / folder).as_posix()}": path.read_bytes()
        for folder, name in FOLDERS.items()
        for path in (root / folder).rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    return sorted(name for name in packed.keys() | there.keys() if packed.get(name) != there.get(name))
