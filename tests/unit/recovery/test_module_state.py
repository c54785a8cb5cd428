"""Test what modules have beside tensors, and the buffers that an update writes to or a step registers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from checkpointless.integrations.torch.torch_tensors import _ExtraState, _unfit_hooks
from checkpointless.state.module_tensors import BufferCopies, TrainingTensors, _ParamGroups


class Counter(torch.nn.Module):
    def __init__(self, count: object) -> None:
        super().__init__()
        self.count = count

    def get_extra_state(self) -> Any:
        return self.count

    def set_extra_state(self, state: Any) -> None:
        self.count = state


def test_modes_and_extra_state_are_put_back() -> None:
    calls, counter = [3], Counter(None)
    first = torch.nn.Sequential(torch.nn.Dropout(), Counter({"calls": calls}), torch.nn.Linear(2, 2))
    first[0].eval()
    state, extra = TrainingTensors([first], []).capture()(), _ExtraState([first]).take()
    calls[0] = 4
    second = torch.nn.Sequential(torch.nn.Dropout(), counter, torch.nn.Linear(2, 2))
    TrainingTensors([second], []).restore(state)
    _ExtraState([second]).put(extra)
    assert [part.training for part in second.modules()] == [True, False, True, True]
    assert counter.count == {"calls": [3]}, "what was taken is nobody's to change"


def test_hooks_of_ddp_that_keep_something_are_refused() -> None:
    class Wrapper(torch.nn.Module):
        _comm_hooks: tuple[tuple[Any, Any], ...] = ()

    wrapper = Wrapper()
    assert _unfit_hooks([wrapper, torch.nn.Linear(1, 1)]) is None
    wrapper._comm_hooks = ((print, None),)
    assert _unfit_hooks([wrapper]) is None
    wrapper._comm_hooks = ((print, {"error": 1}),)
    assert "the communication hook print keeps a dict from step to step" in str(_unfit_hooks([wrapper]))


@pytest.mark.parametrize("how", ["written", "replaced"])
def test_buffers_that_are_written_to_are_found(how: str) -> None:
    norm = torch.nn.BatchNorm1d(2)
    tensors = TrainingTensors([torch.nn.Sequential(torch.nn.BatchNorm1d(2), norm)], [])
    tensors.buffers.mark()
    assert tensors.buffers.written() == []
    if how == "written":
        next(norm.buffers()).add_(1)
    else:
        norm.running_mean = torch.zeros(2)
    assert tensors.buffers.written() == [("model", 0, "1.running_mean")]


def test_new_buffers_are_found_where_a_state_dict_has_them() -> None:
    shared, module = torch.ones(1), torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    module[0].register_buffer("one", shared)
    module[1].register_buffer("same", shared)  # a second name of it
    module[1].register_buffer("later", None)
    tensors = TrainingTensors([module], [])
    assert tensors.buffers.new([module]) == []
    module[1].later = torch.zeros(1)
    module[0].register_buffer("cache", torch.zeros(1), persistent=False)
    assert tensors.buffers.new([module]) == ["1.later"]
    assert ("model", 0, "0.cache") not in tensors.model(), "nobody who is made anew has it"


# --- That the values of param groups are those of the moment, however they are changed afterwards -----------------


def optimizer(**values: Any) -> torch.optim.Optimizer:
    made = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters(), lr=values.pop("lr", 0.1))
    made.param_groups[0].update(values)
    return made


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


# --- Copies of buffers that code outside of the steps has replaced ------------------------------------------------


_LARGE = 1 << 19  # elements: more than is copied each time


def test_buffers_that_a_validation_replaced_in_inference_mode_are_copied_and_put_back() -> None:
    """Lightning validates in that mode, in which ``self.seen = self.seen + 1`` makes a tensor without a version."""
    module: Any = torch.nn.Module()
    module.register_buffer("seen", torch.zeros(()))
    module.register_buffer("cache", torch.zeros(_LARGE))
    copies = BufferCopies([module])
    copies.take()
    with torch.inference_mode():
        module.seen = module.seen + 1
        module.cache = module.cache + 1
    taken = copies.take()
    assert [float(each.max()) for each in taken.values()] == [1, 1]
    with torch.inference_mode():
        module.cache.add_(1)  # which no version tells
    assert [float(each.max()) for each in copies.take().values()] == [1, 2]
    copies.put(taken)
    assert (float(module.seen), float(module.cache.max())) == (1, 1)
    module.seen.add_(1)  # they are plain tensors again
    assert [float(each.max()) for each in copies.take().values()] == [2, 1]
