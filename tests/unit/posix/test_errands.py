"""Test that a loop waits for a disk for a moment only."""

from __future__ import annotations

import threading

import pytest

from checkpointless.cli.terminal import _Errands


def test_an_errand_brings_its_result_or_its_error() -> None:
    errands = _Errands()
    assert errands.run(lambda: 1, 2) == 1

    def fails() -> int:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        errands.run(fails, 2)
    assert errands.run(lambda: 1, 2) == 1


def test_what_takes_too_long_is_waited_for_once_and_its_result_is_not_lost() -> None:
    errands = _Errands(patience_s=0.1)
    gate, came = threading.Event(), threading.Event()
    late: list[bool] = []

    def take(result: bool) -> None:
        late.append(result)
        came.set()

    assert errands.run(lambda: gate.wait(60), False, late=take) is False
    began: list[int] = []
    assert errands.run(lambda: began.append(1), None) is None
    assert not began, "it was begun beside the first one"
    gate.set()
    assert came.wait(60)
    assert late == [True]
    assert errands.run(lambda: 1, 2) == 1


def test_without_threads_an_errand_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    errands = _Errands()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        assert errands.run(lambda: 1, 2) == 2
    assert errands.run(lambda: 1, 2) == 1
