"""Test what is said of a step that is made again with other data or another loss than before the fault."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from checkpointless.inprocess.pace import StepPace
from checkpointless.integrations.torch.repeated_steps import _RepeatedSteps, digest_batch, repeated_steps
from checkpointless.observability.telemetry.events import read_events
from checkpointless.observability.telemetry.steps import StepLog

OTHER_LOSS = "has the loss 2.0, where it had 1.0 before"
OTHER_BATCH = "takes another batch than before the fault"


@pytest.mark.parametrize(
    ("second", "other", "reason"),
    [
        (2.0, torch.ones(2), f"step 3 {OTHER_LOSS}"),
        (1.0, torch.zeros(2), f"step 3 {OTHER_BATCH}"),
        (2.0, torch.zeros(2), f"step 3 {OTHER_BATCH} and {OTHER_LOSS}"),
        (1.0, torch.ones(2), ""),
    ],
)
def test_what_differs_is_an_event(
    second: float, other: torch.Tensor, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHECKPOINTLESS_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    steps = _RepeatedSteps()
    for is_first, loss, taken in ((True, 1.0, torch.ones(2)), (False, second, other)):
        steps.begin_entry(is_first)
        steps.take(3, {"x": [taken]})
        steps.compute(3, loss)
    told = [(event.stage, event.rank, event.fields) for event in read_events(tmp_path)]
    losses = {"loss": 2.0, "before": 1.0} if second == 2.0 else {}
    assert told == ([("inexact", 3, {"step": 3, "reason": reason, **losses})] if reason else [])


@pytest.mark.parametrize(
    ("before", "now", "differs"),
    [
        ([1], [1, 2], False),  # the fault came before the second batch
        ([], [1], False),
        ([5], [1, 2, 3, 4, 5], True),
        ([1, 2], [1], True),
        ([1, 2], [1, 9, 2], True),
        ([1, 2], [2, 1], True),
    ],
)
def test_the_batches_that_the_step_used_are_compared(
    before: list[int], now: list[int], differs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    steps = _RepeatedSteps()
    for is_first, taken in ((True, before), (False, now)):
        steps.begin_entry(is_first)
        for each in taken:
            steps.take(3, torch.tensor(each))
        steps.compute(3, 1.0)
    assert ("takes another batch" in caplog.text) is differs


def _make(steps: _RepeatedSteps, step: int, batch: int, loss: float) -> None:
    steps.take(step, torch.tensor(batch))
    steps.compute(step, loss)


def test_every_step_that_is_made_again_is_compared(caplog: pytest.LogCaptureFixture) -> None:
    """A copy in a tier, or a checkpoint, is older than the newest step."""
    steps = _RepeatedSteps()
    steps.begin_entry(is_first=True)
    for step in range(1, 6):
        _make(steps, step, step, float(step))
    steps.begin_entry(is_first=False)
    for step in (3, 4):
        _make(steps, step, step, float(step))
    assert not caplog.records
    _make(steps, 5, 5, 7.0)
    assert "step 5 has the loss 7.0, where it had 5.0 before" in caplog.text


def test_another_block_makes_other_steps(caplog: pytest.LogCaptureFixture) -> None:
    steps = _RepeatedSteps()
    for batch in (3, 4):
        steps.begin_entry(is_first=True)
        _make(steps, 3, batch, float(batch))
    assert not caplog.records


@pytest.mark.parametrize(("loss", "params"), [(1.0, "a"), (None, "a"), (2.0, "b"), (1.0, "b")])
def test_what_is_recorded_of_a_step_is_compared_with_what_was(
    loss: float | None, params: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of what another process computed, too."""
    StepLog(tmp_path, 0).record(4, 1.0, "a")
    first, later = _RepeatedSteps(), _RepeatedSteps()
    first.begin_entry(is_first=True)
    first.record(StepLog(tmp_path, 0), 3, 1.0, "a")
    later.begin_entry(is_first=False)
    log = StepLog(tmp_path, 0)
    later.record(log, 3, 1.0, "a")
    assert not caplog.records
    later.record(log, 4, loss, params)
    assert ["ends with other parameters than" in each for each in caplog.messages] == [True] * (params == "b")
    later.record(log, 5, 1.0, "z")


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.nn.Module]:
    """Give a module that the process's own noting listens to, in step 3."""
    call = SimpleNamespace(steps=SimpleNamespace(making=3), pace=StepPace(None), leave_if_over=lambda: None)
    monkeypatch.setattr("checkpointless.integrations.torch.repeated_steps.active_call_wrapper", lambda: call)
    net = torch.nn.Sequential(torch.nn.Linear(2, 2))
    repeated_steps.begin_entry(is_first=True)
    with repeated_steps.listening([net]):
        yield net
    repeated_steps.begin_entry(is_first=True)


ONES = torch.ones(1, 2)


def test_a_step_of_a_loop_takes_what_its_modules_are_called_with(net: torch.nn.Module) -> None:
    net(ONES)
    assert repeated_steps.batch_of(3) == digest_batch(ONES)
    assert not repeated_steps.was_validated


def test_a_validation_is_none_of_the_steps(net: torch.nn.Module) -> None:
    with torch.no_grad():
        net(ONES)
    assert repeated_steps.batch_of(3) is None
    assert repeated_steps.was_validated
    repeated_steps.begin_entry(is_first=False)
    assert not repeated_steps.was_validated


def test_copies_of_a_module_and_saved_ones_note_nothing(net: torch.nn.Module) -> None:
    saved = io.BytesIO()
    torch.save(net, saved)
    assert b"checkpointless" not in saved.getvalue(), "it can be loaded where this package is not installed"
    saved.seek(0)
    for other in (copy.deepcopy(net), torch.load(saved, weights_only=False)):
        other(ONES)
    assert repeated_steps.batch_of(3) is None


def test_a_compiled_module_and_functional_transforms_work(net: torch.nn.Module) -> None:
    torch.compile(net, backend="eager", fullgraph=True)(ONES)
    parameters: dict[str, torch.Tensor] = dict(net.named_parameters())

    def of_one(parameters: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = torch.func.functional_call(net, parameters, (row,)).sum()
        return loss

    torch.func.vmap(torch.func.grad(of_one), in_dims=(None, 0))(parameters, torch.ones(4, 2))


def test_a_loop_that_a_fault_has_ended_notes_nothing_twice() -> None:
    net, steps = torch.nn.Linear(2, 2), _RepeatedSteps()
    old, new = steps.listening([net]), steps.listening([net])
    old.__enter__()
    new.__enter__()
    assert len(net._forward_pre_hooks) == 1
    old.__exit__(None, None, None)
    assert len(net._forward_pre_hooks) == 1, "the new loop is still in its steps"
    new.__exit__(None, None, None)
    assert not net._forward_pre_hooks


@pytest.mark.parametrize(
    "batch",
    [torch.rand(3, 5000, 7).transpose(0, 2), torch.rand(8, 4, 4, 2).permute(0, 3, 1, 2), torch.tensor(1.5)],
    ids=["large", "small", "number"],
)
def test_of_a_large_batch_the_first_elements_are_read(batch: torch.Tensor) -> None:
    other = batch.clone()
    other[(0,) * other.dim()] += 1
    assert digest_batch(other) != digest_batch(batch)
