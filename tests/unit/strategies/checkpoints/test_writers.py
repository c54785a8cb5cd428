"""Test the processes that write a rank's part of a checkpoint."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.nemo, pytest.mark.timeout(60)]


def written(monkeypatch: pytest.MonkeyPatch, *acts: Callable[[], Any]) -> Any:
    """Return what a rank is told when each of its writers does one of ``acts``."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    from checkpointless.integrations.lightning.checkpoints.saves import _write_buckets

    def write(transforms: Any, number: int, bucket: Any, results: Any, count: Any, **kwargs: Any) -> None:
        results.put((number, bucket()))
        count.get()
        count.task_done()

    monkeypatch.setattr(FileSystemWriterAsync, "write_preloaded_data", staticmethod(write))
    results: queue.Queue[Any] = queue.Queue()
    _write_buckets([], False, 0, acts, results)
    return results.get_nowait()


def test_each_writers_results_are_told_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    large = [b"x" * 100_000] * 3  # more than a pipe holds
    assert written(monkeypatch, lambda: ["a"], lambda: large) == {0: ["a"], 1: large}


def test_an_error_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    error = written(monkeypatch, lambda: ["a"], lambda: OSError(28, "No space left on device"))
    assert isinstance(error, OSError)
    assert error.errno == 28


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "ended with signal 9"),
        (lambda: os._exit(3), "ended with exit code 3"),
    ],
)
def test_a_writer_that_ends_without_a_word_is_noticed(
    monkeypatch: pytest.MonkeyPatch, end: Callable[[], Any], told: str
) -> None:
    error = written(monkeypatch, lambda: ["a"], end)
    assert isinstance(error, RuntimeError)
    assert str(error).endswith(told)


def test_writers_do_not_outlive_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    from checkpointless.integrations.lightning.checkpoints import saves as writers

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writers, "_said", interrupted)
    before = set(multiprocessing.active_children())
    with pytest.raises(KeyboardInterrupt):
        written(monkeypatch, lambda: time.sleep(50))
    assert set(multiprocessing.active_children()) <= before
