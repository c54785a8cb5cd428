"""Memory is read from the process that holds a secret, and from no other. Here a process reads its own memory."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpointless.posix import process_memory
from checkpointless.posix.process_memory import (
    Secret,
    is_held_by,
    name_reader,
    names_its_readers,
    pid_space,
    read,
    view,
)

OWN = os.getpid()
GONE = 2**22 + 1  # the kernel gives no pid beyond 2^22


def buffer(content: bytes) -> tuple[ctypes.Array[ctypes.c_char], int]:
    made = ctypes.create_string_buffer(content, len(content))
    return made, ctypes.addressof(made)


@pytest.fixture
def end_of_memory() -> Iterator[int]:
    """Yield an address after which two bytes can be read and no more."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert process_memory._libc.mprotect(ctypes.c_void_p(start + page), ctypes.c_size_t(page), 0) == 0
    yield start + page - 2
    process_memory._libc.mprotect(ctypes.c_void_p(start + page), ctypes.c_size_t(page), 3)


def test_ranges_of_any_length_are_copied_in_order() -> None:
    (source, there), (target, here) = buffer(b"abcdefgh"), buffer(bytes(8))
    assert read(OWN, [(here, 3), (here + 3, 0), (here + 4, 3)], [(there, 5), (there + 7, 1)]) == 6
    assert target.raw == b"abc\0deh\0"
    assert source.raw == b"abcdefgh"


def test_a_read_of_two_gib_is_cut_by_the_kernel_at_the_most_bytes_of_a_call() -> None:
    size = process_memory.MOST_BYTES + mmap.PAGESIZE
    libc = process_memory._libc
    libc.mmap.restype = ctypes.c_void_p
    reserve = ctypes.c_int(mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    none = ctypes.c_size_t(0)
    address = libc.mmap(none, ctypes.c_size_t(size), ctypes.c_int(1), reserve, ctypes.c_int(-1), none)
    target, here = buffer(bytes(1 << 20))
    try:  # one MiB is written again and again, so that no memory is taken
        count = read(OWN, [(here, 1 << 20)] * 1024, [(address, size)])
        assert count == 1 << 30
        beyond = read(OWN, [(here, 1)], [(address + size - 1, 1)])
        assert beyond == 1
    finally:
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
    assert target.raw == bytes(1 << 20)


def test_what_cannot_be_read_after_something_is_left_out(end_of_memory: int) -> None:
    target, here = buffer(b"....")
    assert read(OWN, [(here, 4)], [(end_of_memory, 1), (end_of_memory + 1, 3)]) in (1, 2)
    assert target.raw[:1] == b"\0"


# Named: the id of a process in a test's name would differ from one of the suite's workers to the next.
@pytest.mark.parametrize(
    ("pid", "number"),
    [pytest.param(OWN, errno.EFAULT, id="own"), pytest.param(GONE, errno.ESRCH, id="gone")],
)
def test_what_cannot_be_read_at_all_is_an_error(end_of_memory: int, pid: int, number: int) -> None:
    _, here = buffer(b"....")
    with pytest.raises(OSError, match=r".") as raised:
        read(pid, [(here, 4)], [(end_of_memory + 2, 4)])
    assert raised.value.errno == number


def test_a_c_library_without_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "_readv", None)
    with pytest.raises(OSError, match=r".") as raised:
        read(OWN, [], [])
    assert raised.value.errno == errno.ENOSYS


def test_the_holder_of_a_secret_is_known() -> None:
    secret = Secret()
    assert is_held_by(OWN, secret.text, secret.address)
    assert Secret().text != secret.text


def test_nobody_else_is_taken_for_the_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    secret, other = Secret(), Secret()
    assert not is_held_by(OWN, other.text, secret.address), "another secret is there"
    assert not is_held_by(OWN, secret.text, 8), "nothing is there"
    assert not is_held_by(OWN, secret.text, -1)
    assert not is_held_by(OWN, secret.text, 1 << 70)
    assert not is_held_by(OWN, "", secret.address), "an empty secret is no secret"
    assert not is_held_by(OWN, "no hex", secret.address)
    assert not is_held_by(GONE, secret.text, secret.address), "the process is gone"
    monkeypatch.setattr(process_memory.os, "geteuid", lambda: os.stat("/proc/self").st_uid + 1)
    assert not is_held_by(OWN, secret.text, secret.address), "it is another user's"


def test_a_kernel_that_forbids_it_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*arguments: object) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1

    secret = Secret()
    monkeypatch.setattr(process_memory, "_readv", forbidden)
    assert not is_held_by(OWN, secret.text, secret.address)


def test_a_space_has_one_name_in_a_process_and_none_where_the_kernel_tells_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert pid_space() == pid_space() is not None
    monkeypatch.setattr(process_memory, "_BOOT", tmp_path / "nothing")
    assert pid_space() is None


def test_memory_is_seen_where_it_is() -> None:
    memory, address = buffer(b"abcdef")
    seen = view(address + 1, 3)
    assert bytes(seen) == b"bcd"
    memory[2] = b"x"
    assert bytes(seen) == b"bxd"
    assert seen.readonly


@pytest.mark.parametrize(("scope", "names"), [("0\n", False), ("1\n", True), ("2\n", False), (None, False)])
def test_only_yama_demands_that_a_reader_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scope: str | None, names: bool
) -> None:
    monkeypatch.setattr(process_memory, "_YAMA", tmp_path / "scope")
    if scope is not None:
        (tmp_path / "scope").write_text(scope)
    assert names_its_readers() is names


def test_one_process_is_named_and_never_any(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []

    class Libc:
        def prctl(self, *arguments: ctypes._SimpleCData[int]) -> int:
            asked.append([each.value for each in arguments])
            return 0

    monkeypatch.setattr(process_memory, "_libc", Libc())
    name_reader(123)
    name_reader(None)
    assert asked == [[0x59616D61, 123, 0, 0, 0], [0x59616D61, 0, 0, 0, 0]]
