"""Test that nothing of a generation that is over stays in the process."""

from __future__ import annotations

import subprocess
import sys
import weakref

import pytest
import torch

from checkpointless.inprocess.finalize import CheckpointlessFinalizeCleanup, collect_garbage


def _fail_in_a_backward_pass() -> list[weakref.ref[torch.nn.Parameter]]:
    """Run a backward pass that raises in its middle, and return its parameters."""
    parameters = [torch.nn.Parameter(torch.ones(8)) for _ in range(20)]
    products = [parameter * 2 for parameter in parameters]
    products[10].register_hook(lambda _: 1 / 0)
    try:
        sum(products, torch.zeros(8)).sum().backward()
    except ZeroDivisionError:
        pass
    return [weakref.ref(parameter) for parameter in parameters]


def test_the_graph_of_a_backward_pass_that_raised_is_freed() -> None:
    left = _fail_in_a_backward_pass()
    assert any(each() is not None for each in left), "autograd keeps what it had yet to do"
    with torch.no_grad():
        collect_garbage()
    assert [each() for each in left] == [None] * len(left)


@pytest.mark.slow
def test_accelerate_forgets_that_it_is_initialized() -> None:
    """Else its next ``Accelerator`` would make no process group. In a process of its own, for it stays imported."""
    pytest.importorskip("accelerate")
    code = (
        "from accelerate import Accelerator\n"
        "from accelerate.state import PartialState\n"
        f"from {CheckpointlessFinalizeCleanup.__module__} import CheckpointlessFinalizeCleanup\n"
        "Accelerator(cpu=True, gradient_accumulation_steps=2)\n"
        "assert PartialState._shared_state\n"
        "CheckpointlessFinalizeCleanup()()\n"
        "assert not PartialState._shared_state\n"
        "assert Accelerator(cpu=True).gradient_accumulation_steps == 1\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_the_trainer_of_a_clean_up_can_be_assigned_as_documented_and_is_not_kept() -> None:
    cleanup, trainer = CheckpointlessFinalizeCleanup(), torch.nn.Identity()
    cleanup.trainer = trainer
    assert cleanup.trainer is trainer
    del trainer
    assert cleanup.trainer is None
    cleanup.trainer = None
    assert cleanup.trainer is None
