"""Test that nothing of a generation that is over stays in the process."""

from __future__ import annotations

import weakref

import torch

from checkpointless.inprocess.finalize import collect_garbage


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
