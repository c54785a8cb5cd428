"""Test the wrapper's two threads without an agent: the test says what the agent would."""

from __future__ import annotations

import threading
import time

import pytest

from checkpointless.inprocess import HPWrapper, RankShouldRestart
from checkpointless.inprocess.wrap import active_call_wrapper
from checkpointless.launcher.client import FaultNotice, RankClient
from checkpointless.launcher.protocol.messages import Barrier, Done, FaultReport, Finish, Go, Hello, RankMessage

LATE_S = 0.5


class SlowAgent(RankClient):
    """Stands in for an agent with one rank that is slow to say more of a fault that is handled already."""

    def __init__(self) -> None:
        super().__init__(0)
        self.slow = threading.Event()  # set: the fault thread is in ``pending_fault``
        self.quick = threading.Event()  # set: it goes on
        self.generation = 0
        self.said = ""

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def pending_fault(self, generation: int) -> FaultNotice | None:
        """Return what the client does, but late in the fault thread."""
        if threading.current_thread() is not threading.main_thread():
            self.slow.set()
            self.quick.wait(30)
        return super().pending_fault(generation)

    def _send(self, message: RankMessage) -> None:
        if isinstance(message, Hello):
            self._hear(Go(0, None, {}, -1))
        elif isinstance(message, FaultReport):
            self.said = message.cause.message
            self._hear(FaultNotice(message.generation, "1", "it failed", 0))
        elif isinstance(message, Barrier):
            assert self.slow.wait(30), "the fault thread was not told"
            threading.Timer(LATE_S, self.quick.set).start()
            self.generation += 1
            self._hear(Go(self.generation, "1", {}, -1))
        elif isinstance(message, Done):
            self._hear(Finish())


def wrapper_of(agent: SlowAgent) -> HPWrapper:
    return HPWrapper(
        abort=lambda state: None,
        finalize=lambda state: None,
        health_check=lambda state, error: None,
        hp_api_factory=lambda: agent,
    )


@pytest.mark.slow
def test_a_fault_that_is_handled_late_does_not_reach_into_the_next_generation() -> None:
    """The lock stays open and nobody is interrupted, though the fault thread was not done with the old one."""
    agent = SlowAgent()
    errors: list[str] = []
    updates: list[int] = []

    def block() -> str:
        if agent.generation == 0:
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
    assert errors == []
    assert updates == list(range(20))
