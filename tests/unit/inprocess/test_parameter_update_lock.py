"""Test the lock: what a fault may interrupt, what it waits for, and what the rank knows afterwards."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from datetime import timedelta

import pytest

from checkpointless.inprocess import ParameterUpdateLock, RankShouldRestart

SOON = timedelta(seconds=5)


def test_an_update_commits_its_step() -> None:
    lock = ParameterUpdateLock()
    lock.set_committed(3)
    lock.mark_ready(4)
    assert lock.state().ready
    with lock.update(4):
        assert lock.committed == 3
    assert (lock.state().committed, lock.state().ready, lock.state().torn) == (4, False, False)


def test_close_waits_for_the_update_in_progress() -> None:
    lock = ParameterUpdateLock()
    lock.set_committed(0)
    inside, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    def train() -> None:
        with lock.update(1):
            inside.set()
            go_on.wait(60)

    trainer = threading.Thread(target=train)
    trainer.start()
    assert inside.wait(60)

    def close() -> None:
        if lock.close(SOON):
            closed.set()

    closer = threading.Thread(target=close)
    closer.start()
    assert not closed.wait(0.1)
    go_on.set()
    assert closed.wait(60)
    trainer.join()
    closer.join()
    assert lock.committed == 1


def test_close_is_bounded_and_says_so() -> None:
    lock = ParameterUpdateLock()
    with lock.update(1):
        assert not lock.close(timedelta(milliseconds=20))


def test_no_update_begins_after_close() -> None:
    lock = ParameterUpdateLock()
    lock.set_committed(2)
    lock.mark_ready(3)
    assert lock.close(SOON)
    with pytest.raises(RankShouldRestart), lock.update(3):
        raise AssertionError("the update began")
    assert lock.state().ready, "the gradients are still held: the update can be applied later"
    assert lock.committed == 2
    lock.open()
    with lock.update(3):
        pass
    assert lock.committed == 3


def test_an_update_that_fails_is_torn_and_frees_who_waits() -> None:
    lock = ParameterUpdateLock()
    lock.set_committed(2)
    lock.mark_ready(3)
    with pytest.raises(ZeroDivisionError), lock.update(3):
        raise ZeroDivisionError
    assert lock.close(timedelta(0))
    state = lock.state()
    assert state.torn
    assert not state.ready
    assert state.committed == 2
    lock.set_committed(3)
    assert not lock.state().torn


def test_a_close_and_an_update_that_begins_meanwhile_never_miss_each_other() -> None:
    lock = ParameterUpdateLock()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(200):
            inside = [False]
            started = threading.Event()

            def train(inside: list[bool] = inside, started: threading.Event = started) -> None:
                started.set()
                with contextlib.suppress(RankShouldRestart):
                    for step in itertools.count():
                        with lock.update(step):
                            inside[0] = True
                            inside[0] = False

            trainer = threading.Thread(target=train)
            trainer.start()
            assert started.wait(60)
            assert lock.close(SOON), "it did not wait for an update that was refused"
            assert not inside[0]
            trainer.join(60)
            assert not trainer.is_alive()
            lock.open()
    finally:
        sys.setswitchinterval(before)
