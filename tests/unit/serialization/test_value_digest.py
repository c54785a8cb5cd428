"""Test digests of states that do not consist of tensors alone."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpointless.state.serialization.digest import digest_value

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@dataclass
class Thing:
    """Represents a value with parts of its own."""

    name: str
    parts: list[Any] = field(default_factory=list)


@given(plain)
def test_an_equal_value_has_the_same_digest(value: Any) -> None:
    copy = {key: value[key] for key in reversed(value)} if isinstance(value, dict) else value
    assert digest_value({"state": value}) == digest_value({"state": copy})


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, 2),
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        (0.1 + 0.2, 0.3),
        ("a", b"a"),
        (None, 0),
        ([1, 2], [2, 1]),
        ([[1], 2], [1, [2]]),
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"b": 1}),
        (torch.zeros(2), torch.zeros(1, 2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2), torch.tensor([0.0, -0.0])),
        (np.zeros(2), np.zeros(3)),
        (np.float32(1.5), np.float32(1.25)),
        (timedelta(seconds=1), timedelta(seconds=2)),
        (deque([1]), deque([2])),
        (Thing("a", [torch.zeros(1)]), Thing("a", [torch.ones(1)])),
        (torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(3)),
    ],
)
def test_another_value_has_another_digest(a: Any, b: Any) -> None:
    assert digest_value(a) != digest_value(b)
    assert digest_value([a]) == digest_value([a])


def test_what_recovery_may_change_does_not_count() -> None:
    assert digest_value(OrderedDict(b=1, a=2)) == digest_value({"a": 2, "b": 1})
    assert digest_value((1, 2)) == digest_value([1, 2])
    assert digest_value({3, 1, 2}) == digest_value({2, 3, 1})


def test_of_a_path_only_the_last_name_counts() -> None:
    assert digest_value("/runs/1/step=2.ckpt") == digest_value("/runs/2/step=2.ckpt")
    assert digest_value({"/runs/1/x": 1}) == digest_value({Path("/runs/2/x"): 1})
    assert digest_value("/runs/1/step=2.ckpt") != digest_value("/runs/1/step=3.ckpt")
    assert digest_value("a/x") != digest_value("b/x")


def test_a_value_that_contains_itself_or_cannot_be_copied_has_a_digest() -> None:
    def circle(value: int) -> list[Any]:
        found: list[Any] = [value]
        found.append(found)
        return found

    assert digest_value(circle(1)) == digest_value(circle(1))
    assert digest_value(circle(1)) != digest_value(circle(2))
    assert digest_value(threading.Lock()) == digest_value(threading.Lock())
    assert digest_value(print) != digest_value(len)


@pytest.mark.slow
def test_another_process_gives_the_same_digest() -> None:
    program = (
        "from checkpointless.state.serialization.digest import digest_value as d\n"
        "import torch; print(d({'a': {'x', 'y', 'z'}, 'b': [torch.arange(3), 1.5]}))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout.strip() == digest_value({"b": [torch.arange(3), 1.5], "a": {"z", "y", "x"}})
