"""What is done about the exception that ended a block."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from checkpointless.inprocess.exceptions import is_out_of_memory, is_victim, line_of, make_room, text_of
from checkpointless.inprocess.wrap import _is_return, _traceback_of
from checkpointless.launcher.protocol.causes import exit_code


class Built:
    """Takes memory, and refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def error_beside(built: list[weakref.ref[Built]], kind: type[Exception]) -> Exception:
    """Return an exception that was raised for another, beside something large."""

    def build() -> None:
        large = Built()
        built.append(weakref.ref(large))
        raise kind("no more")

    try:
        try:
            build()
        except Exception as first:
            raise kind(f"{first} when it was built") from first
    except Exception as error:
        return error
    raise AssertionError


@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError])
def test_room_is_made_if_there_is_no_more_memory(kind: type[Exception]) -> None:
    built: list[weakref.ref[Built]] = []
    assert make_room(error_beside(built, kind))
    assert built[0]() is None


def test_an_allocation_that_the_host_refuses_is_a_lack_of_memory() -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 62, dtype=torch.uint8)
    assert is_out_of_memory(refused.value)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (None, 0),
        (0, 0),
        (False, 0),
        (True, 1),
        (3, 3),
        (256, 1),
        (-256, 1),
        (-1, 255),
        (1 << 70, 1),
        ("", 1),
        (0.0, 1),
    ],
)
def test_only_nothing_and_0_are_a_success(code: Any, status: int) -> None:
    assert exit_code(SystemExit(code)) == status
    assert _is_return(SystemExit(code)) == (status == 0)


class Unspeakable(RuntimeError):
    """Says nothing of itself."""

    def __getattribute__(self, name: str) -> Any:
        if name == "__notes__":
            raise ValueError("no notes")
        return super().__getattribute__(name)

    def __str__(self) -> str:
        raise self


Unspeakable.__name__ = "One\ncheckpointless: the job has ended\x1b[2J"


def test_an_exception_need_not_be_able_to_say_anything() -> None:
    error = Unspeakable()
    shown = "One checkpointless: the job has ended\\x1b[2J"
    assert text_of(error) == f"<its __str__ raised {shown}>"
    assert line_of(error) == f"{shown}: {text_of(error)}"
    assert line_of(error) in _traceback_of(error)
    assert not is_victim(error)


def test_causes_may_go_in_circles() -> None:
    first, second = RuntimeError("one"), RuntimeError("NCCL")
    first.__cause__, second.__cause__ = second, first
    assert is_victim(first)
    second.args = ("two",)
    assert not is_victim(first)
