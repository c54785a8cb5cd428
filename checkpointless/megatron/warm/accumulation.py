"""The hooks that hang where torch adds up a parameter's gradient: they are kept in C++, beside the parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge


def hooks_of_accumulation(parameters: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Return how many hooks are called before and after each parameter's gradient is added up.

    Megatron's ``DistributedDataParallel`` has one behind each. What nobody holds has none, and is made anew when it
    is needed.
    """
    return [_hooks_of(each) for each in parameters]


def _hooks_of(parameter: torch.Tensor) -> tuple[int, int]:
    if not parameter.requires_grad:
        return 0, 0
    node: Any = get_gradient_edge(parameter).node
    return _count(node.register_prehook), _count(node.register_hook)


def _count(register: Any) -> int:
    """Return how many hooks there are, which are known by who registers a further one."""
    handle = register(_nothing)
    count = len(handle.hooks_dict_ref()) - 1
    handle.remove()
    return count


def _nothing(*_: object) -> None:
    """Do nothing: it is never called."""
