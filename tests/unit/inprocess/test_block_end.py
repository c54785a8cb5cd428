"""What is done about the exception that ended a block."""

from __future__ import annotations

import weakref

import pytest
import torch

from checkpointless.inprocess.block.end import make_room


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


def test_nothing_is_freed_for_another_error() -> None:
    built: list[weakref.ref[Built]] = []
    error = error_beside(built, RuntimeError)
    assert not make_room(error)
    assert built[0]() is not None
    assert error.__traceback__ is not None
