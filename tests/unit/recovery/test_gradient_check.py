"""Test which of three passes is taken for the wrong one, and that a check leaves no trace."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from checkpointless.inprocess import UnrecoverableError
from checkpointless.integrations.torch import gradient_check
from checkpointless.integrations.torch.gradient_check import (
    CorruptedGradientError,
    CorruptedSomewhereError,
    GradientCheck,
)
from checkpointless.observability.telemetry.event_names import EventName
from checkpointless.state.module_tensors import BufferCopies


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.body(x))


class Checked:
    """Runs one step of a model whose gradients are damaged in some of its passes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, every: int | None, *damaged: int, step: int = 4) -> None:
        self.events: list[dict[str, Any]] = []
        self.others: list[int | None] = []  # on which node other ranks were wrong
        monkeypatch.setattr(gradient_check, "true_on_all", bool)
        monkeypatch.setattr(gradient_check, "all_gather_json", lambda mine: [mine, *self.others])
        monkeypatch.setattr(gradient_check, "emit_event", self._emit)
        torch.manual_seed(3)
        self.model, self.passes, self.damaged = Model(), 0, damaged
        state = SimpleNamespace(modules=[self.model], wrappers=[], buffers=BufferCopies([self.model]))
        call = SimpleNamespace(steps=SimpleNamespace(making=step, since_entry=3), faults=None)
        self.check = GradientCheck(every, cast(Any, state), cast(Any, call))

    def _emit(self, name: EventName, **fields: Any) -> None:
        assert name is EventName.CORRUPTED
        self.events.append(fields)

    def compute(self) -> int:
        self.passes += 1
        loss = self.model(torch.randn(8, 4)).square().sum()
        (loss * (1 + self.passes if self.passes in self.damaged else 1)).backward()
        return self.passes


def test_a_wrong_pass_ends_the_step_and_a_wrong_check_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Checked(monkeypatch, 1, 1)
    with pytest.raises(CorruptedGradientError, match=r"gradient of body\S+ and 3 more was computed wrongly in"):
        wrong.check.run(wrong.compute)
    assert [(each["step"], each["parameters"], each["redone"]) for each in wrong.events] == [(4, 4, True)]
    fine = Checked(monkeypatch, 1, 2)
    assert (fine.check.run(fine.compute), fine.passes) == (1, 3)
    assert [each["redone"] for each in fine.events] == [False]
    random = Checked(monkeypatch, 1, 1, 2, 3)
    with pytest.raises(UnrecoverableError, match=r"give three gradients of body.*use_deterministic_algorithms"):
        random.check.run(random.compute)


def test_ranks_of_several_nodes_that_are_wrong_name_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    on_one = Checked(monkeypatch, 1, 1)
    on_one.others = [None, 0]
    with pytest.raises(CorruptedGradientError) as raised:
        on_one.check.run(on_one.compute)
    assert type(raised.value) is CorruptedGradientError
    on_two = Checked(monkeypatch, 1, 1)
    on_two.others = [1]
    with pytest.raises(CorruptedSomewhereError, match="was computed wrongly in step 4"):
        on_two.check.run(on_two.compute)


def test_steps_that_are_not_due_are_run_once_and_those_that_are_must_be_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    between = Checked(monkeypatch, 3, 1)
    assert (between.check.run(between.compute), between.passes, between.events) == (1, 1, [])
    between.check.require()
    with pytest.raises(UnrecoverableError, match="sdc_check_every=2 finds nothing to check in step 4"):
        Checked(monkeypatch, 2).check.require()
