"""Test asynchronous saves: requests, who carries them out, and how they end."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from checkpointless.recovery import LocalCheckpointManager
from checkpointless.replication import DirectoryStore
from checkpointless.replication.local_checkpoint import AsyncRequest
from tests.ranks.local_checkpoint_ranks import Writer, bits, state
from tests.unit.local_checkpoint.disk import files


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Keep files from being written until the event is set."""
    opened = threading.Event()
    write = DirectoryStore.write

    def gated(*arguments: Any) -> None:
        assert opened.wait(60)
        write(*arguments)

    monkeypatch.setattr(DirectoryStore, "write", gated)
    return opened


def begun(manager: LocalCheckpointManager, tree: Any, iteration: int) -> Writer:
    request = manager.save(tree, iteration, is_async=True)
    assert isinstance(request, AsyncRequest)
    return Writer(request)


def test_training_goes_on_while_a_copy_is_written(
    manager: LocalCheckpointManager, gate: threading.Event, tmp_path: Path
) -> None:
    tree = state(0, 5)
    work = begun(manager, tree, 5)
    tree["model"]["layers.0.weight"].add_(1)
    tree["model"]["strided"].zero_()
    assert work.is_alive()
    assert files(tmp_path) == []
    gate.set()
    work.wait()
    assert bits(manager.load()[0]) == bits(state(0, 5))


def test_saves_that_are_being_written_are_left_alone_by_others(
    manager: LocalCheckpointManager, gate: threading.Event, tmp_path: Path
) -> None:
    first, second = begun(manager, {"n": 1}, 1), begun(manager, {"n": 2}, 2)
    assert manager.find_latest() == -1
    gate.set()
    first.wait()
    second.wait()
    assert manager.find_latest() == 2
    manager.save({"n": 3}, 3)
    assert [len(files(tmp_path, iteration)) for iteration in (1, 2, 3)] == [0, 1, 1]


def test_saves_that_end_twice_or_in_another_order_lose_nothing(manager: LocalCheckpointManager) -> None:
    requests = [manager.save({"n": n}, n, is_async=True) for n in (1, 2)]
    for request in requests:
        assert request is not None
        request.write()
    for index in (1, 0, 1, 0):
        request = requests[index]
        assert request is not None
        request.execute_finalize_fns()
    assert manager.find_latest() == 2
    assert manager.load()[0] == {"n": 2}


def test_a_request_that_nobody_carried_out_stands_in_no_way(
    manager: LocalCheckpointManager, tmp_path: Path
) -> None:
    manager.save({"n": 1}, 1, is_async=True)
    manager.save({"n": 2}, 2)
    manager.save({"n": 3}, 3)
    assert manager.find_latest() == 3
    assert manager.load()[0] == {"n": 3}
    assert [int(path.name[5:15]) for path in files(tmp_path)] == [2, 3]


@pytest.mark.parametrize("is_async", [False, True])
def test_no_error_of_a_writer_is_raised_for_which_other_ranks_would_wait(
    manager: LocalCheckpointManager,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_async: bool,
) -> None:
    monkeypatch.setattr(DirectoryStore, "write", lambda *arguments: 1 / 0)
    if is_async:
        begun(manager, {}, 2).wait()
    else:
        manager.save({}, 2)
    assert "part 0 of iteration 2 cannot be written by rank 0" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_a_save_that_was_given_up_is_not_found_after_training_went_back(
    manager: LocalCheckpointManager, tmp_path: Path
) -> None:
    manager.save({"n": 90}, 90)
    abandoned = manager.save({"n": 100}, 100, is_async=True)
    assert abandoned is not None
    abandoned.write()
    manager.save({"n": 95}, 95)
    assert LocalCheckpointManager(tmp_path / "local" / "checkpoints").load()[0] == {"n": 95}


def test_a_killed_writer_costs_its_save(manager: LocalCheckpointManager, caplog: pytest.LogCaptureFixture) -> None:
    manager.save({"n": 1}, 1)
    request = manager.save({"n": 2}, 2, is_async=True)
    assert request is not None
    writer = multiprocessing.get_context("fork").Process(target=signal.raise_signal, args=(signal.SIGKILL,))
    writer.start()
    writer.join()
    request.execute_finalize_fns()
    assert "iteration 2 is not kept" in caplog.text
    assert manager.load()[0] == {"n": 1}


@pytest.mark.slow
def test_another_process_carries_a_request_out(manager: LocalCheckpointManager) -> None:
    """As Megatron's persistent worker does it: what is to be done has to travel to a process that is not forked."""
    request = manager.save(state(0, 4), 4, is_async=True)
    assert request is not None
    writer = multiprocessing.get_context("spawn").Process(target=request.async_fn, args=request.async_fn_args)
    writer.start()
    writer.join()
    assert writer.exitcode == 0
    request.execute_finalize_fns()
    assert bits(manager.load()[0]) == bits(state(0, 4))
