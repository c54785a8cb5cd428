"""Test which ends of a block say that its process cannot enter it again."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, cast

import pytest

from checkpointless.inprocess import HPWrapper, wrap
from checkpointless.inprocess.exceptions import RankShouldRestart
from checkpointless.inprocess.generation import Generation, StepTracker
from checkpointless.inprocess.wrap import HandedOver, Pause, _Blocks, _Succession
from checkpointless.launcher.client import RankClient
from checkpointless.launcher.protocol.board import Facts
from checkpointless.launcher.protocol.messages import Barrier as BarrierMessage
from checkpointless.launcher.protocol.messages import Go, HandOver, Offer, Offered, Paused, RankMessage, Replace
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


def test_what_the_engine_raises_says_nothing_of_the_script() -> None:
    rank = Judged()
    rank.entry(None, made=1)
    of_the_engine = raised(lambda: HPWrapper(abort_timeout=-1))
    assert [rank.entry(of_the_engine), rank.entry(of_the_engine)] == ["", ""]


class Barrier(RankClient):
    """An agent that wants something once, by default a successor, and then begins the next generation."""

    def __init__(self, wanted: HandOver | Offer | PauseMessage = HandOver(0, 5, [0])) -> None:  # noqa: B008
        super().__init__(0)
        self.sent: list[RankMessage] = []
        self._hear(wanted)

    def paused(self, generation: int) -> None:
        self._send(Paused(generation))

    def offered(self, generation: int, source: str, problem: str) -> None:
        self._send(Offered(generation, source, problem))

    def close(self) -> None:
        pass

    def _send(self, message: RankMessage) -> None:
        self.sent.append(message)
        if isinstance(message, BarrierMessage | Offered):
            self._hear(Go(1, None, {}, 5))


def test_a_process_whose_state_finds_no_room_stays_if_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    client, ended = Barrier(), []
    keeper = SimpleNamespace(hand_over=lambda high_water: HandedOver(0, f"no room at {high_water}"))
    monkeypatch.setattr(wrap, "AgentClient", Barrier)
    it = _Succession(Generation(0), client, StepTracker(Generation(0), None), _Blocks(Facts(None)), "process")
    assert it.unfit
    assert it.wait_go(0, cast(Any, keeper)).generation == 1
    assert client.sent == [BarrierMessage(0)]

    def end(code: int) -> None:
        ended.append(code)
        raise SystemExit

    monkeypatch.setattr(os, "_exit", end)
    client = Barrier()
    it = _Succession(Generation(0), client, StepTracker(Generation(0), None), _Blocks(Facts(None)), "in-process")
    with pytest.raises(SystemExit):
        it.wait_go(0, cast(Any, keeper))
    assert client.sent == [Replace(0, "its state could not be handed over: no room at 5")]
    assert ended == [75]


def test_a_process_offers_its_state_and_waits_on(monkeypatch: pytest.MonkeyPatch) -> None:
    client, withdrawn = Barrier(Offer(0, 5, [0], "10.0.0.1")), list[int]()
    left = HandedOver(source="there", withdraw=lambda: withdrawn.append(1))
    keeper = SimpleNamespace(hand_over=lambda *where: left if where == (5, "10.0.0.1") else None)
    monkeypatch.setattr(wrap, "AgentClient", Barrier)
    it = _Succession(Generation(0), client, StepTracker(Generation(0), None), _Blocks(Facts(None)), "in-process")
    assert it.wait_go(0, cast(Any, keeper)).generation == 1
    assert client.sent == [Offered(0, "there")]
    assert withdrawn == [1], "it goes on with its state itself"


def test_a_rank_waits_at_the_agreed_boundary_until_its_generation_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client, beats = Barrier(PauseMessage(0)), list[int]()
    monkeypatch.setattr(wrap, "AgentClient", Barrier)
    assert [Pause(Generation(of), client).is_wanted for of in (0, 1)] == [True, False]
    pause = Pause(Generation(0), client)
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


@pytest.mark.parametrize("has_launcher", [True, False], ids=["torchrun", "none"])
def test_another_launcher_starts_no_successors(has_launcher: bool) -> None:
    client = cast(Any, SimpleNamespace(has_launcher=has_launcher))
    steps, blocks = StepTracker(Generation(0), None), _Blocks(Facts(None))
    if not has_launcher:  # nothing is recovered from
        assert not _Succession(Generation(0), client, steps, blocks, "process").unfit
        return
    with pytest.raises(ValueError, match="needs `checkpointless run`"):
        _Succession(Generation(0), client, steps, blocks, "process")


def test_there_are_two_ways_to_restart() -> None:
    with pytest.raises(ValueError, match="restart is 'in-process' or 'process', and not 'job'"):
        HPWrapper(restart="job")
