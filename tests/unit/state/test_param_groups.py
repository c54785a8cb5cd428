"""Test that the values of param groups are those of the moment, however they are changed afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from checkpointless.state.module_tensors import TrainingTensors, _ParamGroups


def optimizer(**values: Any) -> torch.optim.Optimizer:
    made = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters(), lr=values.pop("lr", 0.1))
    made.param_groups[0].update(values)
    return made


def test_as_long_as_nothing_changes_it_is_the_same_object() -> None:
    inner = optimizer(names=["weight", "bias"])
    groups = _ParamGroups([inner, None])
    taken = groups.take()
    assert groups.take() is taken
    inner.param_groups[0]["lr"] = 0.2
    assert groups.take() is not taken
    assert taken()[0][0]["lr"] == 0.1
    assert taken()[1] == []
    assert "params" not in taken()[0][0]


@pytest.mark.parametrize(
    ("values", "change"),
    [
        ({"lr": torch.tensor(0.1)}, lambda group: group["lr"].fill_(0.2)),
        ({"betas": [0.9, 0.99]}, lambda group: group["betas"].__setitem__(0, 0.8)),
        ({"names": [["a"], ["b"]]}, lambda group: group["names"][0].append("c")),
        ({"own": {"count": 1}}, lambda group: group["own"].update(count=2)),
        ({"step": torch.tensor(3)}, lambda group: group["step"].add_(1)),
    ],
    ids=["tensor", "list", "nested", "dict", "counter"],
)
def test_what_is_changed_in_place_is_kept_as_it_was_and_put_back(values: dict[str, Any], change: Any) -> None:
    inner = optimizer(**values)
    group, groups = inner.param_groups[0], _ParamGroups([inner])
    ((before,),) = groups.take()()
    ((before_too,),) = groups.take()()
    shown = repr(before)
    present = {name: group[name] for name in values}
    change(group)
    ((after,),) = groups.take()()
    assert repr(before) == repr(before_too) == shown != repr(after)
    state = TrainingTensors([], [inner])
    state.restore({"groups": [[before]]})
    ((restored,),) = groups.take()()
    assert repr(restored) == shown
    change(group)
    assert repr(before) == shown, "what is put back is not shared with what is held"
    for name, value in present.items():
        assert not isinstance(value, torch.Tensor) or group[name] is value, "a captured graph may refer to it"
