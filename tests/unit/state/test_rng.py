"""Streams come back bit for bit, from memory and from bytes."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from checkpointless.launcher.protocol.board import Board
from checkpointless.state import rng
from checkpointless.state.port import SnapshotPoint
from checkpointless.state.rank_local.state import _found_on_board, _put_on_board
from checkpointless.state.rng import RngStates, register_rng_source
from tests.interrupting import interrupt


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, 2),
        (1, True),
        (0.0, -0.0),
        (b"1", b"2"),
        (b"1", "1"),
        ({"a": b"1"}, {"a": b"2"}),
        ({"a": b"1"}, {"b": b"1"}),
        ({"a": 1}, {"a": True}),
        ({"a": b"1"}, (("a", b"1"),)),
        ([1], [2]),
        ({"a": [1]}, {"a": [2]}),
        (None, 0),
    ],
)
def test_a_source_that_moved_is_encoded_again_and_one_that_did_not_is_the_same(first: Any, second: Any) -> None:
    now = first
    register_rng_source("own", lambda: now, lambda _: None)
    taken = [RngStates.capture().of_source("own") for _ in range(2)]
    now = second
    taken += [RngStates.capture().of_source("own") for _ in range(2)]
    assert list(map(repr, taken)) == list(map(repr, [first, first, second, second]))


def test_no_instruction_at_which_a_fault_interrupts_leaves_a_stale_stream() -> None:
    """Streams are right when they are taken next, and when they come back to where they were before."""
    own = {"state": b"first"}
    register_rng_source("own", lambda: dict(own), own.update)
    usual = np.random.get_bit_generator()
    try:
        for at in itertools.count(1):
            np.random.set_bit_generator(np.random.MT19937(at))
            own["state"] = b"first"
            before = RngStates.capture()
            draw()
            own["state"] = b"second"
            interrupted = interrupt(RngStates.capture, at, [rng.__file__])
            after = RngStates.capture()
            assert {name for name in before.streams if before.streams[name] == after.streams[name]} <= {
                name for name in before.streams if name.startswith("source:") and name != "source:own"
            }, f"instruction {at}"
            before.restore()
            assert RngStates.capture().streams == before.streams, f"instruction {at}"
            after.restore()
            assert RngStates.capture().streams == after.streams, f"instruction {at}"
            if not interrupted:
                break
    finally:
        np.random.set_bit_generator(usual)
    assert at > 50, "it was interrupted at each of them"


@pytest.mark.parametrize(
    "move",
    [
        random.random,
        lambda: random.gauss(0, 1),
        np.random.rand,
        np.random.standard_normal,  # this uses the second normal number up: no word of the generator changes
        lambda: np.random.seed(5),
        lambda: random.seed(5),
        lambda: torch.rand(()),
        lambda: None,
    ],
)
def test_what_was_taken_before_is_never_taken_for_what_is(move: Callable[[], object]) -> None:
    np.random.standard_normal()  # this leaves a second one pending
    before = RngStates.capture()
    move()
    states = RngStates.capture()
    first = draw(), np.random.standard_normal(), random.gauss(0, 1)
    states.restore()
    assert (draw(), np.random.standard_normal(), random.gauss(0, 1)) == first
    before.restore()
    move()
    assert (draw(), np.random.standard_normal(), random.gauss(0, 1)) == first


@pytest.mark.parametrize("own", [None, {}, {"a": 1.5, "t": torch.arange(3)}])
@pytest.mark.parametrize("loss", [None, 0.0, -0.0, 2.5, np.float64(2.5), np.float32(0.1), torch.tensor(2.5), 3])
def test_everything_comes_back_from_bytes(loss: float | None, own: dict[str, Any] | None) -> None:
    states = RngStates({"a": b"", "b": b"1234"}, loss, SnapshotPoint.LOADED, own)
    found, expected = RngStates.from_bytes(states.to_bytes()), None if loss is None else float(loss)
    assert (found.streams, repr(found.loss), found.stage) == (states.streams, repr(expected), SnapshotPoint.LOADED)
    assert found.own == own if own is None else repr(found.own) == repr(own)


def test_damaged_streams_are_refused_and_those_of_a_board_are_not_there() -> None:
    states = RngStates.capture()
    whole = states.to_bytes()
    for at in (len(whole) // 2, len(whole) - 1):
        with pytest.raises(ValueError, match="damaged"):
            RngStates.from_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    for length in (0, 10, 30, len(whole) - 1):
        with pytest.raises(ValueError, match="random stream"):
            RngStates.from_bytes(whole[:length])
    board = Board.create(0)
    _put_on_board(board, 3, states)
    words = states.streams["torch"]
    place = os.pread(board.fd, Board.SIZE, 0).index(words)
    os.pwrite(board.fd, bytes([words[100] ^ 1]), place + 100)
    assert _found_on_board(board, 3) == {}
    board.close()
