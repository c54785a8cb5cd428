"""An interruption ends the block, wherever in it the thread is, and never reaches what runs after it."""

from __future__ import annotations

import ast
import contextlib
import gc
import multiprocessing
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.util import Finalize, close_fds  # type: ignore[attr-defined]
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import checkpointless
from checkpointless.inprocess import HPWrapper, RankShouldRestart, active_call_wrapper, fault_responder
from checkpointless.inprocess.fault_responder import MainThread
from checkpointless.inprocess.wrap import HPCallWrapper
from checkpointless.launcher.client import FaultNotice, RankClient
from checkpointless.launcher.protocol.messages import Barrier, Done, FaultReport, Finish, Go, Hello, RankMessage

OURS = Path(checkpointless.__file__)


class NoAgent(RankClient):
    """Stands in for an agent: nobody hears what is said, and nobody answers."""

    def __init__(self) -> None:
        super().__init__(0)

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def _send(self, message: RankMessage) -> None:
        """Drop the message."""


@contextmanager
def a_call() -> Iterator[HPCallWrapper]:
    """Yield a wrapper's call in this thread, without an agent."""
    call = HPCallWrapper(HPWrapper(hp_api_factory=NoAgent))
    try:
        yield call
    finally:
        call.shutdown()


ZEROS = os.open("/dev/zero", os.O_RDONLY)


class Yields:
    """Gives up the interpreter's lock in Python when it goes, as files do in C."""

    def __del__(self) -> None:
        time.sleep(0)
        os.read(ZEROS, 1)
        threading.Lock().acquire()


def opened(buffering: int = 0) -> object:
    """Return a file that is left to be torn down."""
    return open("/dev/null", "wb", buffering=buffering)


def returns() -> int:
    each = [Yields(), opened(-1), opened()]
    return len(each)


def raises() -> None:
    each = [opened(-1), Yields(), iter([opened(-1)])]
    raise ValueError(len(each))


def waits() -> None:
    each = [Yields(), opened()]
    while True:
        time.sleep(0)
        len(each)


def tears_down_deeply(depth: int = 4) -> None:
    each = opened()
    if depth:
        return tears_down_deeply(depth - 1)
    time.sleep(0)
    del each


BLOCKS: tuple[Callable[[], object], ...] = (returns, raises, tears_down_deeply, waits)


@pytest.mark.slow
def test_no_interruption_comes_after_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # thousands are raised and swallowed in destructors
    interrupted = stray = left = 0
    over = threading.Event()
    switch_s = sys.getswitchinterval()
    with a_call() as call:

        def interrupt() -> None:
            while not over.is_set():
                call._main.interrupt(60)
                time.sleep(0)  # the main thread has to get something done, too

        shooter = threading.Thread(target=interrupt)
        sys.setswitchinterval(5e-6)
        shooter.start()
        try:
            while left < 3_000:
                try:
                    _, error = call.launch(BLOCKS[left % len(BLOCKS)])
                    interrupted += isinstance(error, RankShouldRestart)
                    assert error is None or isinstance(error, (RankShouldRestart, ValueError))
                    error = None
                    time.sleep(0)
                    if left % 1000 == 0:
                        gc.collect()
                except RankShouldRestart:
                    stray += 1
                left += 1
        finally:
            while True:  # old code may still be hit here
                try:
                    sys.setswitchinterval(switch_s)
                    over.set()
                    shooter.join()
                    break
                except RankShouldRestart:
                    stray += 1
    assert stray == 0
    assert interrupted >= 750, "whoever waits for ever was interrupted"


class QuickAgent(NoAgent):
    """Stands in for an agent with one rank: whatever fails, the next generation begins at once."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[type[RankMessage]] = []

    def _send(self, message: RankMessage) -> None:
        self.heard.append(type(message))
        if isinstance(message, Hello):
            self._hear(Go(0, None, {}, -1))
        elif isinstance(message, FaultReport):
            self._hear(FaultNotice(message.generation, "1", "it failed", 0))
        elif isinstance(message, Barrier):
            self._hear(Go(message.generation + 1, "1", {}, -1))
        elif isinstance(message, Done):
            self._hear(Finish())


@pytest.fixture
def frozen() -> Iterator[None]:
    """Keep the garbage collections of hundreds of restarts from going through all objects of the test process."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def deliver(at: Callable[[int, FrameType], bool], block: Callable[[], str]) -> tuple[str, QuickAgent, int]:
    """Run ``block``, which fails once, to its end, and have an interruption that was asked for earlier come late.

    Args:
        at: told the number and the frame of our next instruction; says whether the interruption comes there.

    Returns:
        What was returned, what the agent heard, and how many instructions there were.
    """
    agent = QuickAgent()
    passed = 0
    calls: list[HPCallWrapper] = []

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal passed
        if "/checkpointless/" not in frame.f_code.co_filename and frame.f_code.co_filename != __file__:
            return None
        if frame.f_code in (trace.__code__, at.__code__, is_outside.__code__):
            return None
        if not calls and (active := active_call_wrapper()) is not None:
            calls.append(active)
        frame.f_trace_opcodes = True
        if event == "opcode" and calls:
            call = calls[0]
            passed += 1
            if at(passed, frame) and signal.getsignal(call._main._signal) != signal.SIG_DFL:
                call._main._to_leave, call._main._waited_s = call._main._entered, 60.0
                signal.raise_signal(call._main._signal)
        return trace

    wrapper = wrapper_of(agent)
    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 reports opcodes only if a frame asked before settrace
    sys.settrace(trace)
    try:
        result = wrapper(block)()
    finally:
        sys.settrace(before)
    return result, agent, passed


def wrapper_of(agent: RankClient) -> HPWrapper:
    return HPWrapper(abort=lambda state: None, finalize=lambda state: None, hp_api_factory=lambda: agent)


def fails_once() -> Callable[[], str]:
    entered = [0]

    def block() -> str:
        entered[0] += 1
        if entered[0] == 1:
            raise ValueError("the fault")
        return "done"

    return block


def test_a_block_may_start_the_documented_thread_that_hears_of_faults_again() -> None:
    agent = QuickAgent()

    def block() -> str:
        call = active_call_wrapper()
        assert call is not None
        call.start_hp_fault_handling_thread()
        return "done"

    assert wrapper_of(agent)(block)() == "done"
    assert agent.heard == [Hello, Done]


@pytest.mark.parametrize("is_known", [False, True])
def test_what_is_raised_when_a_fault_is_known_is_no_sign(monkeypatch: pytest.MonkeyPatch, is_known: bool) -> None:
    monkeypatch.setattr("checkpointless.inprocess.wrap._left", 0)
    calls, fails = list[Any](), fails_once()

    def block() -> str:
        calls.append(active_call_wrapper())
        if len(calls) == 1:
            calls[0].steps.begin(0)
            calls[0].steps.end()
            raise ValueError("the fault")
        calls[0]._responder.noticed += is_known  # as if another rank had one
        return fails()

    assert wrapper_of(QuickAgent())(block)() == "done"
    assert bool(calls[0]._succession.unfit) is not is_known


def is_outside(frame: FrameType | None) -> bool:
    return not fault_responder._is_in_block(frame)


@pytest.mark.usefixtures("frozen")
def test_an_interruption_at_every_instruction_outside_of_the_block_changes_nothing() -> None:
    """They go from the block's end to the barrier and to the wrapper's end: clean-up, groups, health, shutdown."""
    functions: set[str] = set()

    def everywhere(_: int, frame: FrameType) -> bool:
        functions.add(frame.f_code.co_name)
        return is_outside(frame)

    result, agent, passed = deliver(everywhere, fails_once())
    assert (result, agent.heard) == ("done", [Hello, FaultReport, Barrier, Done])
    assert functions >= {"run", "launch", "handle_fn_exception", "restart", "forget_frames", "initialize_barrier"}
    assert functions >= {"destroy", "abort", "shutdown", "uninstall", "wait_finish_or_fault"}
    assert passed > 1000


@pytest.mark.slow
@pytest.mark.usefixtures("frozen")
def test_whichever_instruction_of_the_block_is_interrupted_it_is_entered_again() -> None:
    inside: list[int] = []

    def note(number: int, frame: FrameType) -> bool:
        if not is_outside(frame):
            inside.append(number)
        return False

    deliver(note, fails_once())
    hit = 0
    for number in inside:

        def here(at: int, frame: FrameType, number: int = number) -> bool:
            nonlocal hit
            due = at == number and not is_outside(frame)
            hit += due
            return due

        result, agent, _ = deliver(here, fails_once())
        found = [result, *agent.heard[:1], *agent.heard[-2:]]
        assert found == ["done", Hello, Barrier, Done], f"instruction {number}"
    assert hit > 50


def test_an_interruption_from_the_keyboard_ends_the_process_and_leaves_nothing() -> None:
    agent, threads = QuickAgent(), set(threading.enumerate())
    # What a shell starts in the background, tests included, ignores the keyboard.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def block() -> None:
        signal.raise_signal(signal.SIGINT)
        time.sleep(5)

    try:
        with pytest.raises(KeyboardInterrupt):
            HPWrapper(hp_api_factory=lambda: agent)(block)()
    finally:
        left = signal.signal(signal.SIGINT, before)
    assert (agent.heard, left, active_call_wrapper()) == ([Hello], signal.default_int_handler, None)
    assert set(threading.enumerate()) <= threads  # those of earlier tests may end meanwhile


@pytest.mark.parametrize("file", fault_responder._OWNERLESS)
def test_what_is_spared_is_where_it_is_said_to_be(file: str) -> None:
    """A framework's new version, or a module of ours that moves, must not leave it unspared."""
    folders = (Path(multiprocessing.__file__).parents[1], Path(torch.__file__).parents[1], OURS.parents[1])
    (source,) = {folder / file.lstrip("/") for folder in folders if (folder / file.lstrip("/")).is_file()}
    tree = ast.parse(source.read_text())
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert set(fault_responder._OWNERLESS[file]) <= defined


@pytest.mark.parametrize("is_lost", [False, True], ids=["interrupted", "a peer is lost"])
def test_what_is_put_back_on_the_way_of_a_fault_is_put_back_as_a_whole(is_lost: bool) -> None:
    """Interruptions come every 50 ms; a peer that is lost ends a collective before the first of them."""
    back: list[int] = []
    with a_call() as call:

        def block() -> None:
            with call._main.putting_back():
                try:
                    if is_lost:
                        raise ConnectionError("a peer is lost")
                    while True:
                        time.sleep(0.001)
                finally:
                    for each in range(300):
                        time.sleep(0.001)
                        back.append(each)

        def interrupt() -> None:
            time.sleep(0.05)
            assert call._main.interrupt_until_left(10.0, lambda _: None)

        thread = threading.Thread(target=interrupt)
        thread.start()
        _, error = call.launch(block)
        thread.join()
    assert len(back) == 300
    assert isinstance(error, ConnectionError if is_lost else RankShouldRestart)


LATE_S = 0.5


class SlowAgent(QuickAgent):
    """Is slow, in the fault thread, to say more of a fault that is handled already."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = threading.Event()  # set: the fault thread is in ``pending_fault``
        self.quick = threading.Event()  # set: it goes on

    def pending_fault(self, generation: int) -> FaultNotice | None:
        if threading.current_thread() is not threading.main_thread():
            self.slow.set()
            self.quick.wait(30)
        return super().pending_fault(generation)

    def _send(self, message: RankMessage) -> None:
        if isinstance(message, Barrier):
            assert self.slow.wait(30), "the fault thread was not told"
            threading.Timer(LATE_S, self.quick.set).start()
        super()._send(message)


@pytest.mark.slow
def test_a_fault_that_is_handled_late_does_not_reach_into_the_next_generation() -> None:
    """The lock stays open and nobody is interrupted, though the fault thread was not done with the old one."""
    agent = SlowAgent()
    errors: list[str] = []
    updates: list[int] = []

    def block() -> str:
        if Barrier not in agent.heard:
            raise ValueError("the fault")
        call = active_call_wrapper()
        assert call is not None
        try:
            for step in range(20):
                time.sleep(2 * LATE_S / 20)
                with call.parameter_update_lock.update(step):
                    updates.append(step)
        except RankShouldRestart as error:
            errors.append(str(error))
        return "done"

    assert wrapper_of(agent)(block)() == "done"
    assert (errors, updates) == ([], list(range(20)))


# --- Pipes and files are closed all the same ----------------------------------------------------------------------


class Owner:
    """Can be referred to weakly, and does something in its destructor."""

    def __init__(self, end: Callable[[], object] = int) -> None:
        self.end = end

    def __del__(self) -> None:
        self.end()


def leave_while(body: Callable[[], object], limit_s: float = 20, since: Callable[[], bool] = lambda: True) -> None:
    """Have this thread, in a block, do ``body``, and be interrupted from ``since`` on until it has left."""
    main, began = MainThread(), threading.Event()

    def interrupt() -> None:
        began.wait()
        while not since():
            time.sleep(0.005)
        main.interrupt_until_left(limit_s, lambda _: None)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()

    def block() -> None:
        began.set()
        body()
        while True:
            time.sleep(0.005)

    with pytest.raises(RankShouldRestart):
        main.run(block)
    main.close()
    interrupter.join(60)


def slow_to_close() -> tuple[int, socket.socket]:
    """Return a connection and its other end; nobody reads what was sent, so its ``close`` takes a second."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 1))
    sender.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            sender.send(bytes(65536))
    sender.setblocking(True)
    return sender.detach(), receiver


def test_both_pipes_of_a_worker_are_closed() -> None:
    first, receiver = slow_to_close()
    second, writer = os.pipe()
    owners = [Owner()]
    Finalize(owners[0], close_fds, (first, second))  # a process of multiprocessing does the same
    with receiver:
        leave_while(owners.clear)
    os.close(writer)
    assert not any(os.path.exists(f"/proc/self/fd/{each}") for each in (first, second))


def test_a_destructor_ends_and_is_interrupted_afterwards() -> None:
    ended = []

    def end() -> None:
        for _ in range(40):
            time.sleep(0.005)
        ended.append(True)

    leave_while([Owner(end)].clear)
    assert ended


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_destructor_that_does_not_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_responder, "_CLEANING_S", 0.2)

    def never_end() -> None:
        while True:
            time.sleep(0.005)

    leave_while([Owner(never_end)].clear)
