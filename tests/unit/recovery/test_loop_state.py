"""Test the declared state of a loop, and which variables of a loop are named because they are not declared."""

from __future__ import annotations

import functools
import random
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpointless import Value
from checkpointless.integrations.torch import loop
from checkpointless.integrations.torch.loop import _LoopState, _Undeclared
from checkpointless.state.rank_local.declared import take_object
from checkpointless.state.serialization import state_tree
from checkpointless.state.serialization.digest import digest_value


@pytest.fixture(autouse=True)
def _nothing_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_warned", set())


SCALER = functools.partial(torch.amp.GradScaler, "cpu")

#: How a value of each kind is made, and what changes it.
KINDS: dict[str, tuple[Any, Any]] = {
    "value": (lambda: Value(0.5), lambda it: setattr(it, "value", 1.5)),
    "list": (list, lambda it: it.append(1)),
    "dict": (dict, lambda it: it.update(a=1)),
    "set": (set, lambda it: it.add(1)),
    "deque": (lambda: deque(maxlen=3), lambda it: it.append(1)),
    "tensor": (lambda: torch.zeros(2), lambda it: it.add_(1)),
    "array": (lambda: np.zeros(2), lambda it: it.__iadd__(1)),
    "torch": (torch.Generator, lambda it: torch.rand(1, generator=it)),
    "random": (lambda: random.Random(1), lambda it: it.random()),
    "numpy": (lambda: np.random.default_rng(1), lambda it: it.random()),
    "numpy-legacy": (lambda: np.random.RandomState(1), lambda it: it.normal()),
    "scaler": (SCALER, lambda it: it.load_state_dict({**it.state_dict(), "scale": 2.0})),
    "module": (lambda: torch.nn.Linear(1, 1), lambda it: it.weight.data.add_(1)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_declared_state_is_put_back_in_place(kind: str) -> None:
    make, change = KINDS[kind]
    value = make()
    state = _LoopState({"it": value})
    taken = digest_value(take_object(value))
    kept = {name: state_tree.loads(state_tree.dumps(each)) for name, each in state.values().items()}
    change(value)
    assert digest_value(take_object(value)) != taken
    state.put(kept)
    assert digest_value(take_object(value)) == taken


def _train(undeclared: _Undeclared, steps: int) -> Iterator[int]:
    for step in range(1, steps + 1):
        undeclared.look(sys._getframe(1))
        yield step


def test_variables_that_change_are_named(caplog: pytest.LogCaptureFixture) -> None:
    norms: list[float] = []
    average, best, still = 0.0, None, [1]
    scaler = SCALER()
    other = torch.nn.Linear(2, 2)
    for step in _train(_Undeclared([]), 5):
        loss = 1.0 / step
        norms.append(loss)
        average = 0.9 * average + 0.1 * loss
        with torch.no_grad():
            other.weight.add_(1)
    (said,) = caplog.messages
    assert ": average, norms, other. " in said
    assert "state={'average': Value(average)}" in said
    assert (best, still, scaler.get_scale()) == (None, [1], 65536.0)


def test_what_is_declared_or_restored_anyway_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    norms: list[float] = []
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = {"norms": norms}
    wrapped = torch.nn.Sequential(model)
    known = [optimizer, state, norms, model, *model.parameters()]
    for step in _train(_Undeclared(known), 5):
        norms.append(float(step))
        with torch.no_grad():
            model.weight.add_(1)
    assert caplog.messages == []
    assert len(wrapped) == 1


def test_an_iterator_from_before_the_first_step_is_named(caplog: pytest.LogCaptureFixture) -> None:
    batches = iter([torch.zeros(1)] * 9)
    for _ in _train(_Undeclared([]), 4):
        next(batches)
    (said,) = caplog.messages
    assert "the iterator batches was made before the first step" in said


def test_a_log_file_is_no_iterator_of_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (tmp_path / "log").open("a") as log, (tmp_path / "log").open() as rows:
        for step in _train(_Undeclared([]), 4):
            print(step, rows.readline(), file=log)
    (said,) = caplog.messages
    assert "the iterator rows was made before the first step" in said


def test_variables_are_not_asked_more_than_what_they_are(caplog: pytest.LogCaptureFixture) -> None:
    class Unhashable(type):
        __hash__ = None  # type: ignore[assignment]

    odd = Unhashable("Odd", (), {})()  # for which an abstract class such as IOBase cannot be looked up
    for _ in _train(_Undeclared([]), 4):
        assert odd is not None
    assert caplog.messages == []


def test_none_tuples_and_arrays_are_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    average: Any = None
    hidden: Any = (torch.zeros(1), torch.zeros(1))
    table, rows = np.zeros(2), [[0]] * 100_000
    for step in _train(_Undeclared([]), 4):
        average = float(step) if average is None else 0.9 * average + step
        hidden = (hidden[0] + 1, hidden[1])
        table[0] += step
    (said,) = caplog.messages
    assert ": average, hidden, table. " in said
    assert len(rows) == 100_000
