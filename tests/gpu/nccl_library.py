"""NCCL in the kit: its newest library, cut to the code of one GPU architecture so that it can be carried.

The library that torch brings may be too old to let several ranks share a GPU. Another one of the same name takes
its place if it is loaded first (``LD_PRELOAD``). Nearly all of its 300 MB are code for architectures that the
machine does not have: their entries stay in the directory, with zeros in the place of their code, which packs well.
The layout of such fat binaries is that of ``fatbinary_section.h`` and of what ``cuobjdump`` prints.
"""

from __future__ import annotations

import lzma
import shutil
import struct
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from checkpointless.system.nccl import LIBRARY

#: Of CUDA 13, like torch 2.11 and newer.
WHEEL = "nvidia-nccl-cu13==2.31.2"
PACKED = f"{LIBRARY}.xz"
#: What every part gets that loads it: no multicast over NVLink, which one GPU does not have.
SETTINGS = {"NCCL_NVLS_ENABLE": "0"}
_IN_WHEEL = f"nvidia/nccl/lib/{LIBRARY}"
_IMAGES, _RELOCATABLE = ".nv_fatbin", "__nv_relfatbin"
_MAGIC, _ELF = 0xBA55ED50, 2
_FILE_HEADER = struct.Struct("<IHHQ")  # magic, version, bytes of the header, bytes of all entries
_ENTRY = struct.Struct("<HHIQ")  # kind, version, bytes of the header, bytes of the code
_ARCH_AT = 28  # in an entry's header
_SECTION = struct.Struct("<IIQQQQIIQQ")


def cut(library: bytearray, arch: int) -> None:
    """Overwrite device code that is not for ``arch`` with zeros, in place."""
    sections = _sections(library)
    if _RELOCATABLE in sections:  # for linkers alone
        begin, end = sections[_RELOCATABLE]
        library[begin:end] = bytes(end - begin)
    kept = 0
    for code, found in _images(library, *sections.get(_IMAGES, (0, 0))):
        if found == arch:
            kept += code.stop - code.start
        else:
            library[code] = bytes(code.stop - code.start)
    if not kept:
        raise ValueError(f"the library has no code for compute capability {arch / 10:g}")


def collect(wheel: Path, arch: int, folder: Path) -> Path:
    """Write the library of a wheel into ``folder``, cut and packed, and return its path."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / LIBRARY
        with zipfile.ZipFile(wheel) as archive:
            library = bytearray(archive.read(_IN_WHEEL))
        cut(library, arch)
        path.write_bytes(library)
        if strip := shutil.which("strip"):
            subprocess.run([strip, "--strip-debug", str(path)], check=True)
        packed = folder / PACKED
        packed.write_bytes(lzma.compress(path.read_bytes(), preset=6))
    return packed


def unpack(folder: Path, site: Path) -> Path | None:
    """Unpack the library of a kit into ``site``, and return its path; None if the kit has none."""
    packed = folder / PACKED
    if not packed.is_file():
        return None
    path = site / LIBRARY
    path.write_bytes(lzma.decompress(packed.read_bytes()))
    return path


def _sections(library: bytearray) -> dict[str, tuple[int, int]]:
    """Return where each section of an ELF file begins and ends."""
    (table,) = struct.unpack_from("<Q", library, 0x28)
    _, count, names = struct.unpack_from("<HHH", library, 0x3A)
    rows = [_SECTION.unpack_from(library, table + _SECTION.size * number) for number in range(count)]
    texts = rows[names][4]
    found = {}
    for name, _, _, _, begin, size, *_ in rows:
        text = library[texts + name : library.index(b"\0", texts + name)].decode()
        found[text] = (begin, begin + size)
    return found


def _images(library: bytearray, begin: int, end: int) -> Iterator[tuple[slice, int]]:
    """Yield where the code of each entry lies, and its architecture; 0 for what is no machine code."""
    while begin < end:
        magic, _, header, size = _FILE_HEADER.unpack_from(library, begin)
        if magic != _MAGIC:
            begin += 8  # what aligns the next file
            continue
        begin += header
        last = begin + size
        while begin < last:
            kind, _, header, size = _ENTRY.unpack_from(library, begin)
            (arch,) = struct.unpack_from("<I", library, begin + _ARCH_AT)
            yield slice(begin + header, begin + header + size), arch if kind == _ELF else 0
            begin += header + size
        begin = last
