"""Test what modules have beside tensors, and the buffers that an update writes to or a step registers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from checkpointless.integrations.torch.torch_tensors import _ExtraState, _unfit_hooks
from checkpointless.state.module_tensors import TrainingTensors


class Tensors(TrainingTensors):
    """Modules of this rank alone."""


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
    state, extra = Tensors([first], []).capture()(), _ExtraState([first]).take()
    calls[0] = 4
    second = torch.nn.Sequential(torch.nn.Dropout(), counter, torch.nn.Linear(2, 2))
    Tensors([second], []).restore(state)
    _ExtraState([second]).put(extra)
    assert [part.training for part in second.modules()] == [True, False, True, True]
    assert counter.count == {"calls": [3]}, "what was taken is nobody's to change"


def test_nothing_is_put_back_of_a_state_that_has_nothing() -> None:
    module = torch.nn.Dropout().eval()
    Tensors([module], []).restore({})
    assert not module.training


def test_an_extra_state_that_cannot_travel_is_named() -> None:
    assert _ExtraState([Counter(1)]).unfit() is None
    reason = _ExtraState([torch.nn.Sequential(Counter(object()))]).unfit()
    assert reason is not None
    assert reason.startswith("Counter.get_extra_state returns what cannot travel")


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
    tensors = Tensors([torch.nn.Sequential(torch.nn.BatchNorm1d(2), norm)], [])
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
    tensors = Tensors([module], [])
    assert tensors.buffers.new([module]) == []
    module[1].later = torch.zeros(1)
    module[0].register_buffer("cache", torch.zeros(1), persistent=False)
    assert tensors.buffers.new([module]) == ["1.later"]
    assert ("model", 0, "0.cache") not in tensors.model(), "nobody who is made anew has it"
