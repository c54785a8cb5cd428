"""Test the lock: what a fault may interrupt, what it waits for, and what the rank knows afterwards."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta

import pytest

from checkpointless.inprocess import ParameterUpdateLock, RankShouldRestart
from checkpointless.inprocess.parameter_update_lock import CommitState

SOON = timedelta(seconds=5)


def lock_at(committed: int) -> ParameterUpdateLock:
    lock = ParameterUpdateLock()
    lock.set_committed(committed)
    return lock


def test_an_update_commits_its_step() -> None:
    lock = lock_at(3)
    lock.mark_ready(4)
    assert lock.state().ready
    with lock.update(4):
        assert lock.committed == 3
    assert lock.state() == CommitState(4, ready=False, torn=False)


def test_close_waits_for_the_update_in_progress() -> None:
    lock, inside, go_on = lock_at(0), threading.Event(), threading.Event()

    def train() -> None:
        with lock.update(1):
            inside.set()
            go_on.wait(60)

    with ThreadPoolExecutor(2) as pool:
        pool.submit(train)
        assert inside.wait(60)
        closed = pool.submit(lock.close, SOON)
        assert not wait([closed], 0.1).done
        go_on.set()
        assert closed.result(60)
    assert lock.committed == 1


def test_close_is_bounded_and_says_so() -> None:
    lock = ParameterUpdateLock()
    with lock.update(1):
        assert not lock.close(timedelta(milliseconds=20))


def test_no_update_begins_after_close() -> None:
    lock = lock_at(2)
    lock.mark_ready(3)
    assert lock.close(SOON)
    with pytest.raises(RankShouldRestart), lock.update(3):
        raise AssertionError("the update began")
    assert lock.state() == CommitState(2, ready=True, torn=False), "the gradients are still held for a later update"
    lock.open()
    with lock.update(3):
        pass
    assert lock.committed == 3


def test_an_update_that_fails_is_torn_and_frees_who_waits() -> None:
    lock = lock_at(2)
    lock.mark_ready(3)
    with pytest.raises(ZeroDivisionError), lock.update(3):
        raise ZeroDivisionError
    assert lock.close(timedelta(0))
    assert lock.state() == CommitState(2, ready=False, torn=True)
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
