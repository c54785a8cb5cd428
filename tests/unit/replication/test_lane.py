"""A lane does one task after the other, and none after it was left or after one that failed."""

from __future__ import annotations

import logging
import threading

import pytest

from checkpointless.inprocess.communicators.helper_thread import run_in_helper_thread
from checkpointless.replication import copier as lanes
from checkpointless.replication.copier import _Lane

LIMIT_S = 30.0


def ended(lane: _Lane) -> bool:
    lane._thread.join(LIMIT_S)
    return not lane._thread.is_alive()


def test_no_task_begins_after_it_was_left() -> None:
    lane, begun, go_on, done = _Lane("testing"), threading.Event(), threading.Event(), []

    def first() -> None:
        begun.set()
        go_on.wait(LIMIT_S)
        done.append("first")

    lane.do(first)
    lane.do(lambda: done.append("second"))
    assert begun.wait(LIMIT_S)
    assert not lane.is_idle
    lane.leave()
    go_on.set()
    assert ended(lane)
    assert done == ["first"]


def test_an_error_ends_it_and_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(lanes, "_LEAVING_S", 0.05)
    lane, done = _Lane("copying"), []

    def fail() -> None:
        raise RuntimeError("a disk is gone")

    with caplog.at_level(logging.ERROR):
        lane.do(fail)
        lane.do(lambda: done.append("later"))
        assert ended(lane)
    assert lane.is_idle
    assert not done
    assert "copying: no task is done any more until the next recovery: a disk is gone" in caplog.text


def test_a_call_that_does_not_return_is_not_waited_for_for_ever() -> None:
    go_on = threading.Event()
    with pytest.raises(TimeoutError, match="no answer within"):
        run_in_helper_thread(lambda: go_on.wait(LIMIT_S), 0.05)
    go_on.set()
    assert run_in_helper_thread(lambda: 3, LIMIT_S) == 3
    with pytest.raises(OSError, match="gone"):
        run_in_helper_thread(lambda: fail(), LIMIT_S)


def fail() -> None:
    raise OSError("gone")


def test_an_error_of_a_fault_that_is_being_handled_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    lane, begun, go_on = _Lane("copying"), threading.Event(), threading.Event()

    def fail() -> None:
        begun.set()
        go_on.wait(LIMIT_S)
        raise RuntimeError("connection closed by peer")

    lane.do(fail)
    assert begun.wait(LIMIT_S)
    go_on.set()
    lane.leave()
    assert ended(lane)
    assert not caplog.text
