"""Test asynchronous saves: requests, who carries them out, and how they end."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path
from typing import Any

import pytest

from checkpointless.recovery import LocalCheckpointManager
from checkpointless.replication import DirectoryStore
from checkpointless.replication.local_checkpoint import AsyncRequest
from tests.ranks.local_checkpoint_ranks import Writer, bits, state
from tests.unit.local_checkpoint.conftest import files


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
