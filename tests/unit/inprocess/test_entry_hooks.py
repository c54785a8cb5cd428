"""A block that is entered again has torch's hooks for all modules and optimizers as often as in a new process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils.hooks import RemovableHandle

from checkpointless.inprocess.block.entry_hooks import EntryHooks

REGISTER: dict[str, Callable[[Callable[..., None]], RemovableHandle]] = {
    "forward": lambda hook: modules.register_module_forward_hook(hook, always_call=True, with_kwargs=True),
    "before forward": modules.register_module_forward_pre_hook,
    "backward": modules.register_module_full_backward_hook,
    "before backward": modules.register_module_full_backward_pre_hook,
    "parameter": modules.register_module_parameter_registration_hook,
    "buffer": modules.register_module_buffer_registration_hook,
    "module": modules.register_module_module_registration_hook,
    "before the step": optimizers.register_optimizer_step_pre_hook,
    "after the step": optimizers.register_optimizer_step_post_hook,
}


def _step() -> None:
    """Do all that the hooks are called in."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(3, 2, requires_grad=True)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", REGISTER)
def test_hooks_that_the_block_registers_again_are_there_once_and_all_others_stay(kind: str) -> None:
    called: list[str] = []
    handles = [REGISTER[kind](lambda *_, **__: called.append("before"))]

    def enter() -> None:
        handles.append(REGISTER[kind](lambda *_, **__: called.append("each time")))

    try:
        entry = EntryHooks.capture()
        enter()
        handles.append(REGISTER[kind](lambda *_, **__: called.append("once")))
        _step()
        calm = sorted(called)
        for _ in range(2):
            entry.restore()
            enter()
            entry.settle()
            called.clear()
            _step()
            assert sorted(called) == calm
    finally:
        for each in handles:
            each.remove()
    called.clear()
    _step()
    assert not called, "those who hold a handle can still remove what is registered"


def test_hooks_that_the_block_has_removed_are_there_again() -> None:
    called: list[str] = []
    handle = modules.register_module_forward_hook(lambda *_: called.append("before"), always_call=True)
    try:
        entry = EntryHooks.capture()
        handle.remove()
        entry.restore()
        _step()
    finally:
        handle.remove()
    assert called
