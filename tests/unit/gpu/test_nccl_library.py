"""Test how NCCL's library is cut, on a library of the same layout."""

from __future__ import annotations

import lzma
import struct
import zipfile
from pathlib import Path

import pytest

from tests.gpu import nccl_library

NAMES = b"\0.nv_fatbin\0__nv_relfatbin\0.shstrtab\0"


def entry(kind: int, arch: int, code: bytes) -> bytes:
    head = struct.pack("<HHIQ", kind, 0x101, 64, len(code)).ljust(28, b"\0") + struct.pack("<I", arch)
    return head.ljust(64, b"\0") + code


def fat_binary(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(images: bytes, relocatable: bytes = b"linker") -> bytearray:
    """Return an ELF file with these sections."""
    parts = {"": b"", ".nv_fatbin": images, "__nv_relfatbin": relocatable, ".shstrtab": NAMES}
    data, rows = bytearray(64), []
    for name, content in parts.items():
        rows.append((NAMES.index(name.encode() + b"\0"), len(data), len(content)))
        data += content
    struct.pack_into("<Q", data, 0x28, len(data))
    struct.pack_into("<HHH", data, 0x3A, 64, len(rows), 3)
    for name_at, begin, size in rows:
        data += struct.pack("<IIQQQQIIQQ", name_at, 1, 0, 0, begin, size, 0, 0, 8, 0)
    return data


def test_only_the_code_of_one_architecture_is_left() -> None:
    images = fat_binary(entry(2, 80, b"for 8.0 "), entry(2, 90, b"for 9.0 "), entry(1, 90, b"its text"))
    made = library(images + bytes(8) + fat_binary(entry(2, 90, b"more 9.0")))
    size = len(made)
    nccl_library.cut(made, 90)
    assert len(made) == size
    assert [text in made for text in (b"for 9.0", b"more 9.0")] == [True, True]
    assert [text in made for text in (b"for 8.0", b"its text", b"linker")] == [False, False, False]


def test_a_library_without_code_for_the_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no code for compute capability 10$"):
        nccl_library.cut(library(fat_binary(entry(2, 90, b"for 9.0 "))), 100)


def test_it_travels_packed_and_lies_beside_the_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)  # what is cut here has no sections that strip knows
    wheel, folder, site = tmp_path / "nccl.whl", tmp_path / "kit", tmp_path / "site"
    for each in (folder, site):
        each.mkdir()
    assert nccl_library.unpack(folder, site) is None
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("nvidia/nccl/lib/libnccl.so.2", bytes(library(fat_binary(entry(2, 90, b"for 9.0 ")))))
    packed = nccl_library.collect(wheel, 90, folder)
    path = nccl_library.unpack(folder, site)
    assert path is not None
    assert path.read_bytes() == lzma.decompress(packed.read_bytes())
    assert b"for 9.0" in path.read_bytes()
