"""Test how declared state and plain attributes are captured, kept within a limit, and put back."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.state.rank_local import declared
from checkpointless.state.rank_local.declared import DeclaredState, declared_state
from checkpointless.state.serialization import state_tree
from checkpointless.system.environment import RANK_STATE_BYTES_ENV

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


class Box:
    name = "box"

    def __init__(self, **has: Any) -> None:
        self.has: dict[str, Any] = has

    def values(self) -> Mapping[str, Any]:
        return self.has

    def put(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self.has[name] = declared.put_value(self.has.get(name), value)


@pytest.fixture(autouse=True)
def _nothing_is_declared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(declared, "_named", set())
    yield
    declared_state.begin()


@given(PLAIN, PLAIN)
def test_what_was_captured_comes_back(first: Any, then: Any) -> None:
    box = Box(value=first)
    state = DeclaredState(lambda: [box])
    taken = dict(state.take())
    box.has["value"] = then
    state.take()
    state.put(taken)
    assert state.take() == taken  # bytes, in which NaN is equal to itself


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([0.0], lambda it: it.__setitem__(0, -0.0)),
        ([1], lambda it: it.__setitem__(0, True)),
        ({"a": [1]}, lambda it: it["a"].append(2)),
        (deque([1], maxlen=2), lambda it: it.append(2)),
        ({3}, lambda it: it.add(4)),
        (torch.zeros(2), lambda it: it.data.add_(1)),
        ([torch.zeros(2)], lambda it: it[0].data.add_(1)),
    ],
    ids=["zero", "true", "nested", "deque", "set", "tensor", "list-of-tensors"],
)
def test_a_change_in_place_is_seen_and_undone_in_place(value: Any, change: Any) -> None:
    box = Box(value=value)
    state = DeclaredState(lambda: [box])
    before = dict(state.take())
    change(value)
    assert state.take() != before
    state.put(before)
    assert state.take() == before
    if not isinstance(value, torch.Tensor):
        assert box.has["value"] is value


def test_a_tensor_that_a_validation_made_in_inference_mode_comes_back() -> None:
    with torch.inference_mode():
        box = Box(value=torch.ones(2))
    state = DeclaredState(lambda: [box])
    before = dict(state.take())
    with torch.inference_mode():
        box.has["value"] = torch.zeros(2)
    state.put(before)
    assert box.has["value"].tolist() == [1, 1]


def test_what_is_left_out_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    box = Box(small=[1, 2], large=b"x" * 300, lock=object())
    state = DeclaredState(lambda: [box], limit=200)
    assert list(state.take()) == ["plain:box.small"]
    state.take()
    (record,) = caplog.records
    assert "box.large, box.lock" in record.getMessage()
    box.has["small"] = b"y" * 300
    assert state.take() == {}
    assert "box.small" in caplog.records[-1].getMessage()


@pytest.mark.parametrize(
    ("text", "limit"), [("4096", 4096), ("", 1024 * 1024), ("much", 1024 * 1024), ("99000000", 1792 * 1024)]
)
def test_the_limit_is_a_setting(text: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANK_STATE_BYTES_ENV, text)
    assert DeclaredState(list)._limit == limit


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Pair(NamedTuple):
    loss: float
    color: Color


@pytest.mark.parametrize("value", [Color.RED, [Color.RED, Color.BLUE], {Color.RED: 1}, Pair(0.5, Color.BLUE)])
def test_enum_members_and_named_tuples_come_back_in_a_new_process(
    value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = Box(value=value)
    state = DeclaredState(lambda: [box])
    state.take()
    state.put({})  # all is encoded once more, when the classes are known
    taken = dict(state.take())
    monkeypatch.setattr(state_tree, "_registered", {})  # as in a new process
    fresh = Box(value=None)
    DeclaredState(lambda: [fresh]).put(taken)
    assert fresh.has == {"value": value}


def test_parameters_belong_to_the_model(caplog: pytest.LogCaptureFixture) -> None:
    net = torch.nn.Linear(2, 2)
    box = Box(trained=list(net.parameters()), by_name=dict(net.named_parameters()))
    assert DeclaredState(lambda: [box]).take() == {}
    assert caplog.records == []


def test_declared_state_that_cannot_be_kept_is_refused() -> None:
    DeclaredState(lambda: [Box(norms=[])]).require_all()
    with pytest.raises(ValueError, match=r"box\.ema is no plain data or larger than the limit of 500 bytes"):
        DeclaredState(lambda: [Box(norms=[], ema={"weight": torch.zeros(999)})], limit=500).require_all()
