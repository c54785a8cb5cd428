"""Test what is said of a step that is made again with other data or another loss than before the fault."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch.utils.data import dataloader

from checkpointless.recovery.training.repeated_steps import RepeatedSteps
from checkpointless.telemetry.events import read_events

NAN = float("nan")


def again(first: float, batch: torch.Tensor, second: float, other: torch.Tensor) -> None:
    steps = RepeatedSteps()
    for loss, taken in ((first, batch), (second, other)):
        steps.begin_entry()
        steps.take(3, {"x": [taken]})
        steps.compute(3, loss)


@pytest.mark.parametrize(
    ("second", "other", "says"),
    [
        (1.0, torch.ones(2), ""),
        (2.0, torch.ones(2), "has the loss 2.0, where it had 1.0"),
        (NAN, torch.ones(2), "has the loss nan"),
        (1.0, torch.zeros(2), "takes another batch"),
        (1.0, torch.ones(1, 2), "takes another batch"),
    ],
)
def test_what_differs_is_said_once(
    second: float, other: torch.Tensor, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        again(1.0, torch.ones(2), second, other)
    assert says in caplog.text
    assert len(caplog.records) == bool(says)


@pytest.mark.parametrize(("second", "other"), [(2.0, torch.ones(2)), (2.0, torch.zeros(2)), (1.0, torch.ones(2))])
def test_another_loss_is_an_event_even_if_the_batch_was_told_of(
    second: float, other: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHECKPOINTLESS_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    again(1.0, torch.ones(2), second, other)
    told = [(event.stage, event.rank, event.fields) for event in read_events(tmp_path)]
    expected = ("inexact", 3, {"step": 3, "loss": 2.0, "before": 1.0})
    assert told == ([expected] if second == 2.0 else [])


def test_a_loss_that_is_no_number_twice_is_the_same(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        again(NAN, torch.ones(2), NAN, torch.ones(2))
    assert not caplog.records


@pytest.mark.parametrize(
    ("before", "now", "differs"),
    [
        ([5], [1, 2, 3, 4, 5], False),  # the loop goes past the batches of earlier steps first
        ([1], [1, 2], False),  # the fault came before the second batch
        ([1, 2], [9, 1, 2], False),  # after a validation
        ([], [1], False),
        ([5], [1, 2, 3, 4], True),
        ([1, 2], [1, 9, 2], True),
        ([1, 2], [2, 1], True),
    ],
)
def test_the_batches_that_the_step_used_are_compared(
    before: list[int], now: list[int], differs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    steps = RepeatedSteps()
    for taken in (before, now):
        steps.begin_entry()
        for each in taken:
            steps.take(3, torch.tensor(each))
        steps.compute(3, 1.0)
    assert ("takes another batch" in caplog.text) is differs


def test_a_loop_that_a_fault_has_ended_and_that_is_still_referred_to_notes_nothing_twice() -> None:
    steps, iterator = RepeatedSteps(), dataloader._BaseDataLoaderIter
    original = iterator.__next__
    old, new = steps.listening(), steps.listening()
    old.__enter__()
    listens = iterator.__next__
    assert listens is not original
    new.__enter__()
    assert iterator.__next__ is listens
    old.__exit__(None, None, None)
    assert iterator.__next__ is listens, "the new loop is still in its steps"
    new.__exit__(None, None, None)
    assert iterator.__next__ is original
