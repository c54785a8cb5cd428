"""A block that a fault has left finds torch's modes, hooks and working directory as at its first entry."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils.hooks import RemovableHandle

from checkpointless.inprocess.wrap import _Entry


def test_modes_that_were_changed_for_a_while_are_as_before() -> None:
    before = _Entry()
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", torch.float16)
    finally:
        before.restore()
    assert (torch.get_default_dtype(), torch.is_grad_enabled()) == (torch.float32, True)
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16


REGISTER: dict[str, Callable[[Callable[..., None]], RemovableHandle]] = {
    "forward": lambda hook: modules.register_module_forward_hook(hook, always_call=True, with_kwargs=True),
    "before backward": modules.register_module_full_backward_pre_hook,
    "parameter": modules.register_module_parameter_registration_hook,
    "after the step": optimizers.register_optimizer_step_post_hook,
}


def _step() -> None:
    """Do all that the hooks are called in."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(3, 2, requires_grad=True)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", REGISTER)
def test_hooks_for_all_modules_are_there_once_however_often_the_block_registers_them(kind: str) -> None:
    called: list[str] = []
    handles = [REGISTER[kind](lambda *_, **__: called.append("before"))]
    try:
        entry = _Entry()
        for _ in range(3):
            handles.append(REGISTER[kind](lambda *_, **__: called.append("each time")))
            called.clear()
            _step()
            assert called.count("each time") == called.count("before") > 0
            handles[0].remove()
            entry.restore()
    finally:
        for each in handles:
            each.remove()
    called.clear()
    _step()
    assert not called, "those who hold a handle can still remove what is registered"


def test_a_relative_chdir_leads_to_the_same_folder_at_each_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = _Entry()
    for _ in range(2):
        os.makedirs("outputs", exist_ok=True)
        os.chdir("outputs")
        assert Path.cwd() == tmp_path / "outputs"
        before.restore()
