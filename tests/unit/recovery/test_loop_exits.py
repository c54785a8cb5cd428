"""Test what is noted of calls of ``steps()`` that are left."""

from __future__ import annotations

import logging

import pytest

from checkpointless.integrations.torch import loop as loop_exits
from checkpointless.integrations.torch.loop import _LoopExits


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_exits, "_warned", set())


def test_a_call_that_is_not_over_was_left_when_the_next_begins(caplog: pytest.LogCaptureFixture) -> None:
    exits = _LoopExits()
    assert [exits.begin_call(0), exits.begin_call(4)] == [0, 1]
    exits.end_call()
    assert exits.begin_call(8) == 2
    assert exits.take()["left"] == [(0, 4)]
    assert exits.was_left(0, 4)
    assert not exits.was_left(0, 3), "its step is still to be made"
    assert not exits.was_left(1, 8)
    assert caplog.text.count("steps() was left by break or return") == 1


def test_a_last_call_is_named_when_the_block_is_left(caplog: pytest.LogCaptureFixture) -> None:
    exits = _LoopExits()
    exits.begin_call(0)
    exits.end_call()
    exits.warn_if_left()
    assert not caplog.records
    exits.begin_call(3)
    with caplog.at_level(logging.WARNING):
        exits.warn_if_left()
    assert len(caplog.records) == 1


def test_what_is_noted_is_put_back_by_the_number_of_the_call() -> None:
    exits = _LoopExits()
    for step in (0, 4, 8):
        exits.begin_call(step)
    exits.ends = True
    later = _LoopExits()
    later.put(exits.take())
    assert later.ends
    later.resume(exits.own())
    assert later.resumed_in == 2
    assert later.was_left(0, 6)
    assert not later.was_left(1, 6), "its step is still to be made"
    assert not later.was_left(2, 9)
