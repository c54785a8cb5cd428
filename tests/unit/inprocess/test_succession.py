"""Test which ends of a block say that its process cannot enter it again."""

from __future__ import annotations

from typing import Any, cast

import pytest

from checkpointless.inprocess import wrap
from checkpointless.inprocess.exceptions import RankShouldRestart
from checkpointless.inprocess.generation import Generation, StepTracker
from checkpointless.inprocess.wrap import _Blocks, _Pause, _Succession
from checkpointless.launcher.client import RankClient
from checkpointless.launcher.protocol.board import Facts
from checkpointless.launcher.protocol.messages import Barrier as BarrierMessage
from checkpointless.launcher.protocol.messages import Go, HandOver, Offer, Offered, Paused, RankMessage
from checkpointless.launcher.protocol.messages import Pause as PauseMessage


@pytest.fixture(autouse=True)
def no_block_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the blocks of other tests in this process."""
    monkeypatch.setattr(wrap, "_left", 0)


def block() -> None:
    register()


def register() -> None:
    raise ValueError("model is already registered")


def raised(fn: Any) -> BaseException:
    try:
        fn()
    except BaseException as error:
        return error
    raise AssertionError("it has not raised")


class Judged:
    """A rank whose block is entered again and again."""

    def __init__(self) -> None:
        self.steps = StepTracker(Generation(0), None)
        self.it = _Succession(Generation(0), cast(Any, None), self.steps, _Blocks(Facts(None)), "in-process")

    def entry(self, error: BaseException | None, made: int = 0, recovers: bool = False) -> str:
        self.steps.enter()
        for step in range(made):
            self.steps.begin(step)
            self.steps.end()
        self.steps.recovers = recovers
        self.it.judge(error, block)
        return self.it.unfit


def test_the_first_entry_after_steps_that_raises_before_the_recovery() -> None:
    rank = Judged()
    assert rank.entry(raised(block)) == "", "no step was made"
    assert rank.entry(ValueError("a bug"), made=2) == ""
    unfit = rank.entry(raised(block))
    assert "ValueError: model is already registered" in unfit
    assert "of test_succession.py (register()) in front of" in unfit


def test_after_the_recovery_it_takes_two_in_a_row() -> None:
    rank = Judged()
    rank.entry(None, made=1)
    assert rank.entry(raised(block), recovers=True) == ""
    assert rank.entry(None, made=1) == ""
    assert [rank.entry(MemoryError()), rank.entry(MemoryError())] == ["", ""], (
        "memory is freed, and it is tried again"
    )
    assert rank.entry(raised(block), recovers=True) == ""
    assert rank.entry(raised(block), recovers=True)


@pytest.mark.parametrize("error", [RuntimeError("Connection closed by peer"), None])
def test_what_says_nothing_of_the_script(error: BaseException | None) -> None:
    rank = Judged()
    rank.entry(None, made=1)
    assert [rank.entry(error), rank.entry(error)] == ["", ""]


class Barrier(RankClient):
    """An agent that wants something once, by default a successor, and then begins the next generation."""

    def __init__(self, wanted: HandOver | Offer | PauseMessage = HandOver(0, 5, [0])) -> None:  # noqa: B008
        super().__init__(0)
        self.sent: list[RankMessage] = []
        self._hear(wanted)

    def close(self) -> None:
        pass

    def _send(self, message: RankMessage) -> None:
        self.sent.append(message)
        if isinstance(message, BarrierMessage | Offered):
            self._hear(Go(1, None, {}, 5))


def test_a_rank_waits_at_the_agreed_boundary_until_its_generation_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client, beats = Barrier(PauseMessage(0)), list[int]()
    assert [_Pause(Generation(of), client).is_wanted for of in (0, 1)] == [True, False]
    pause = _Pause(Generation(0), client)
    pause.is_agreed = True

    def end() -> None:
        if len(beats) == 3:
            raise RankShouldRestart

    with pytest.raises(RankShouldRestart):
        pause.wait(lambda: beats.append(1), end)
    assert (client.sent, pause.is_agreed) == ([Paused(0)], False)
    monkeypatch.setattr(wrap, "_PAUSE_LIMIT_S", 0.0)
    pause.wait(lambda: None, end)  # there is no coordinator any more
    assert "training goes on" in caplog.text
    assert not pause.is_wanted, "else each step would wait that long"
