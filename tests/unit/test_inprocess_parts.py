"""Compositions, aborts and the wrapper's settings, without processes."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest
from torch.utils.data._utils import signal_handling as torch_workers

from checkpointless.inprocess import (
    AbortTransformerEngine,
    CheckpointlessAbortManager,
    Compose,
    HPAbortTorchDistributed,
    HPCheckpointingAbort,
    HPDataLoaderAbort,
    HPState,
    HPWrapper,
    RankShouldRestart,
)
from checkpointless.inprocess.fault_thread import MainThread
from checkpointless.inprocess.memory import peak_growth, reset_peak
from checkpointless.inprocess.signal_handlers import SignalHandlers
from checkpointless.inprocess.wrap import is_victim

STATE = HPState(rank=0, world_size=1, local_rank=0, generation=0)


def test_compose_runs_all_and_raises_the_first() -> None:
    calls: list[str] = []

    def failing(state: HPState) -> None:
        calls.append("failing")
        raise KeyError("first")

    with pytest.raises(KeyError, match="first"):
        Compose(failing, lambda state: calls.append("last"))(STATE)
    assert calls == ["failing", "last"]


def test_default_abort_is_the_documented_one() -> None:
    kinds = [type(each) for each in CheckpointlessAbortManager.get_default_checkpointless_abort().instances]
    assert kinds == [AbortTransformerEngine, HPCheckpointingAbort, HPAbortTorchDistributed, HPDataLoaderAbort]


def test_override_replaces_one_kind() -> None:
    default = CheckpointlessAbortManager.get_default_checkpointless_abort()
    mine = HPCheckpointingAbort()
    changed = CheckpointlessAbortManager.override_abort(default, HPCheckpointingAbort, mine)
    assert mine in changed.instances
    assert mine not in default.instances
    with pytest.raises(ValueError, match="holds no"):
        CheckpointlessAbortManager.override_abort(Compose(mine), HPDataLoaderAbort, HPDataLoaderAbort())
    with pytest.raises(ValueError, match="instances"):
        CheckpointlessAbortManager.override_abort(object(), HPDataLoaderAbort, mine)  # type: ignore[arg-type]


def test_custom_abort_needs_one() -> None:
    with pytest.raises(ValueError):
        CheckpointlessAbortManager.create_custom_abort()


def test_early_abort_communicator_moves_it_to_the_front() -> None:
    wrapper: Any = HPWrapper(early_abort_communicator=True)
    assert isinstance(wrapper.abort.instances[0], HPAbortTorchDistributed)
    assert len(wrapper.abort.instances) == 4


def test_disabled_wrapper_is_the_function_itself() -> None:
    def block() -> int:
        return 1

    assert HPWrapper(enabled=False)(block) is block


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="abort_timeout"):
        HPWrapper(abort_timeout=0)


def test_victims_are_told_from_culprits() -> None:
    gloo = RuntimeError(
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"
    )
    assert is_victim(gloo)
    assert not is_victim(RuntimeError("index out of range"))
    with pytest.raises(ValueError) as caught:
        raise ValueError("outer") from gloo
    assert is_victim(caught.value)


def test_the_main_thread_is_interrupted_until_it_has_left_and_not_after() -> None:
    outcome: list[str] = []
    ready = threading.Event()
    holder: list[MainThread] = []

    def block() -> None:
        main = MainThread()
        holder.append(main)
        try:
            main.enter()
            ready.set()
            for _ in range(3):  # user code that swallows what it should not
                try:
                    while True:
                        time.sleep(0.005)
                except RankShouldRestart:
                    outcome.append("swallowed")
            outcome.append("left")
        finally:
            main.leave()
        time.sleep(0.2)
        outcome.append("undisturbed")

    thread = threading.Thread(target=block)
    thread.start()
    assert ready.wait(5)
    assert holder[0].interrupt_until_left(5, lambda: None)
    holder[0].interrupt()
    thread.join(5)
    assert outcome == ["swallowed"] * 3 + ["left", "undisturbed"]


def test_handlers_that_a_block_leaves_are_taken_back() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    handlers = SignalHandlers()
    try:
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        handlers.restore()
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGUSR1, before[1])


def test_torch_hears_of_dead_workers_also_after_its_handler_was_taken_back() -> None:
    before = signal.getsignal(signal.SIGCHLD), torch_workers._SIGCHLD_handler_set
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        torch_workers._SIGCHLD_handler_set = False
        handlers = SignalHandlers()
        torch_workers._set_SIGCHLD_handler()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # as Lightning does when `fit` is over
        handlers.restore()
        torch_workers._set_SIGCHLD_handler()
        assert callable(signal.getsignal(signal.SIGCHLD))
    finally:
        signal.signal(signal.SIGCHLD, before[0])
        torch_workers._SIGCHLD_handler_set = before[1]


def test_the_peak_of_memory_counts_from_its_reset() -> None:
    block = b"x" * 200_000_000
    reset_peak()
    assert peak_growth()["peak_growth_bytes"] < 50_000_000
    more = b"y" * 100_000_000
    del more
    assert 90_000_000 < peak_growth()["peak_growth_bytes"] < 150_000_000
    del block
