"""Nobody waits for what a data-loader worker left behind: a lock that it had, a message that it did not end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection, util
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from checkpointless.callbacks import trainer_parts  # noqa: F401 - which knows where a trainer has its loaders
from checkpointless.inprocess import HPDataLoaderAbort, HPState
from checkpointless.inprocess.abort import share_socket_folder
from checkpointless.system import temp_folder

pytestmark = pytest.mark.lightning

STATE = HPState(rank=0, world_size=1, local_rank=0, generation=0)
LONG = 1 << 20  # bytes: a pipe takes less


def variable_of_a_caller(name: str) -> Any:
    frame: FrameType | None = sys._getframe()
    while frame is not None and name not in frame.f_locals:
        frame = frame.f_back
    assert frame is not None
    return frame.f_locals[name]


def dies_with_the_lock(index: int) -> int:
    """Kill the worker while it holds the lock with which it looks whether it is to end."""
    if index == 1:
        variable_of_a_caller("done_event")._cond.acquire()
        os.kill(os.getpid(), signal.SIGKILL)
    return index


def dies_between_open_and_unlink(index: int) -> int:
    """Kill the worker, which leaves what torch makes for each tensor that is handed over."""
    if index == 1:
        (temp_folder.SHARED_MEMORY / f"torch_{os.getpid()}_1_2").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return index


def ignores_sigterm(index: int) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return index


def tensor(index: int) -> torch.Tensor:
    return torch.full((4,), index)


class Eight(Dataset[Any]):
    """Eight items, which a function gives."""

    def __init__(self, item: Callable[[int], Any]) -> None:
        self.item = item

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.item(index)


Iterators = Callable[[Callable[[int], Any]], Any]


@pytest.fixture
def iterator_of() -> Iterator[Iterators]:
    made: list[Any] = []

    def make(item: Callable[[int], Any]) -> Any:
        made.append(iter(DataLoader(Eight(item), batch_size=None, num_workers=1)))
        return made[-1]

    yield make
    for each in made:
        for worker in each._workers:
            if not connection.wait([worker.sentinel], 0):  # its number may be somebody else's by now
                if each._worker_pids_set:  # otherwise torch's SIGCHLD handler raises in the next test
                    each._worker_pids_set = False
                    signal_handling._remove_worker_pids(id(each))
                worker.kill()
                worker.join()


def abort(iterator: Any) -> None:
    trainer = Mock()  # can be referred to weakly
    trainer.fit_loop = SimpleNamespace(
        _combined_loader=SimpleNamespace(_iterator=SimpleNamespace(iterators=[iterator]))
    )
    data_loader_abort = HPDataLoaderAbort()
    data_loader_abort.register_attributes(trainer)
    data_loader_abort(STATE)


def comes_to_its_end(wait: Callable[[], object]) -> bool:
    """Return whether ``wait`` returns or raises in time, in a thread that nothing interrupts."""

    def run() -> None:
        try:
            wait()
        except (RuntimeError, EOFError, OSError):
            return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    return not thread.is_alive()


def wait_until_dead(iterator: Any) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(RuntimeError):  # torch's handler of SIGCHLD says that it was killed
            if not iterator._workers[0].is_alive():
                return
            time.sleep(0.01)
    raise AssertionError("the worker lives")


def test_a_lock_that_a_worker_died_with(iterator_of: Iterators) -> None:
    iterator = iterator_of(dies_with_the_lock)
    wait_until_dead(iterator)
    assert not iterator._workers_done_event._cond.acquire(False), "the lock is nobody's any more"
    abort(iterator)
    assert comes_to_its_end(iterator._shutdown_workers)


def test_a_message_of_which_half_was_written(iterator_of: Iterators) -> None:
    iterator = iterator_of(lambda index: bytes(LONG))
    while not iterator._worker_result_queue._reader.poll(0.1):
        continue
    time.sleep(0.2)  # meanwhile the worker fills the pipe and waits
    abort(iterator)
    assert comes_to_its_end(lambda: next(iterator))


def test_a_worker_that_ignores_sigterm(iterator_of: Iterators) -> None:
    iterator = iterator_of(ignores_sigterm)
    assert next(iterator) == 0
    abort(iterator)
    assert not iterator._workers[0].is_alive()
    assert comes_to_its_end(iterator._shutdown_workers)


def test_what_a_killed_worker_had_in_shared_memory_goes(iterator_of: Iterators) -> None:
    iterator = iterator_of(dies_between_open_and_unlink)
    wait_until_dead(iterator)
    (left,) = temp_folder.SHARED_MEMORY.glob(f"torch_{iterator._workers[0].pid}_*")
    abort(iterator)
    assert not left.exists()


def test_the_socket_of_a_killed_worker_goes_and_that_of_a_living_one_stays(iterator_of: Iterators) -> None:
    share_socket_folder()

    def sockets() -> set[Path]:
        return set(Path(util.get_temp_dir()).glob("listener-*"))

    before = sockets()
    first = iterator_of(tensor)
    assert next(first).tolist() == [0] * 4
    (of_first,) = sockets() - before
    second = iterator_of(tensor)
    assert next(second).tolist() == [0] * 4
    (of_second,) = sockets() - before - {of_first}
    abort(first)
    assert sockets() - before == {of_second}
    for index in range(1, 5):
        assert next(second).tolist() == [index] * 4
