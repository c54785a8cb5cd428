"""Test that what is built in old memory is what was held, or is somewhere else."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.distributed import DistributedDataParallel

from checkpointless.integrations.megatron.warm.old_memory import OldMemory
from checkpointless.transfer.tensor_entry import Key

pytestmark = pytest.mark.nemo


def held(*sizes: int) -> dict[Key, torch.Tensor]:
    """Return a state with main parameters of these sizes, each with moments."""
    state: dict[Key, torch.Tensor] = {("model", 0, "weight"): torch.ones(2)}
    for index, size in enumerate(sizes):
        state["optimizer", 0, 0, index, "parameter"] = torch.full((size,), float(index))
        state["optimizer", 0, 0, index, "exp_avg"] = torch.zeros(size)
    return state


def made(old: OldMemory, monkeypatch: pytest.MonkeyPatch, *sizes: int) -> list[torch.Tensor]:
    """Return the main parameters that an optimizer makes of 16-bit parameters of these sizes."""

    def make() -> list[torch.Tensor]:
        return [torch.zeros(size, dtype=torch.bfloat16).clone().float() for size in sizes]

    monkeypatch.setattr(megatron_optimizer, "get_megatron_optimizer", make)
    optimizers: Any = megatron_optimizer
    with old.used():
        return list(optimizers.get_megatron_optimizer())


def test_main_parameters_are_those_that_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    state = held(3, 4)
    old = OldMemory(state)
    first, second = made(old, monkeypatch, 3, 4)
    keys = [("optimizer", 0, 0, index, "parameter") for index in range(2)]
    assert [first.data_ptr(), second.data_ptr()] == [state[key].data_ptr() for key in keys]
    assert old.nbytes == 28
    old.check({keys[0]: first, keys[1]: second})
    assert first.data_ptr() == state[keys[0]].data_ptr()
    assert torch.ones(1, dtype=torch.bfloat16).float().dtype == torch.float32, "all is as it was"


def elsewhere(function: Callable[[], object]) -> Any:
    """Return what a function returns in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_another_thread_that_converts_meanwhile_gets_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a logger's or a loader's does."""
    state = held(3, 4)
    found: list[torch.Tensor] = []

    def make() -> list[torch.Tensor]:
        short = [torch.zeros(size, dtype=torch.bfloat16) for size in (3, 4)]
        found.append(elsewhere(short[0].clone().float))
        return [each.float() for each in short]

    monkeypatch.setattr(megatron_optimizer, "get_megatron_optimizer", make)
    optimizers: Any = megatron_optimizer
    with OldMemory(state).used():
        main = optimizers.get_megatron_optimizer()
        others = elsewhere(optimizers.get_megatron_optimizer)
    places = {each.data_ptr() for each in state.values()}
    assert [each.data_ptr() in places for each in main] == [True, True]
    assert not places & {each.data_ptr() for each in [*found, *others]}
    assert [each.tolist() for each in found] == [[0.0] * 3] * 2


def test_another_thread_wraps_its_own_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped: list[list[int]] = []
    monkeypatch.setattr(
        DistributedDataParallel,
        "__init__",
        lambda _, __, ___, module: wrapped.append(list(module.weight.data.stride())),
    )
    old = OldMemory({})
    with old.used():
        wrap: Any = partial(DistributedDataParallel.__init__, *(None, None, None))  # type: ignore[arg-type]
        elsewhere(partial(wrap, torch.nn.Linear(2, 2).bfloat16()))
        wrap(torch.nn.Linear(2, 2).bfloat16())
    assert wrapped == [[2, 1], [0, 0]]


def test_an_optimizer_of_another_shape_makes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    state = held(3, 4, 5)
    first, second, third = made(OldMemory(state), monkeypatch, 3, 6, 5)
    places = {each.data_ptr() for each in state.values()}
    assert [each.data_ptr() in places for each in (first, second, third)] == [True, False, False]


def test_what_lies_in_anothers_place_gets_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    state = held(3, 3)
    old = OldMemory(state)
    first, second = made(old, monkeypatch, 3, 3)
    old.check({("optimizer", 0, 0, 1, "parameter"): first, ("optimizer", 0, 0, 0, "parameter"): second})
    places = {each.data_ptr() for each in state.values()}
    assert not {first.data_ptr(), second.data_ptr()} & places
    assert [each.tolist() for key, each in state.items() if key[-1] == "parameter"] == [[0.0] * 3, [1.0] * 3]


def test_trained_parameters_in_16_bits_shrink_until_they_are_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def wrap(wrapper: object, config: object, ddp_config: object, module: torch.nn.Module) -> None:
        seen.extend(each.untyped_storage().nbytes() for each in module.parameters())
        for each in module.parameters():
            each.data = torch.empty(each.shape, dtype=each.dtype).copy_(each.data)

    init: Callable[..., None] = wrap
    monkeypatch.setattr(DistributedDataParallel, "__init__", init)
    module = torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False), torch.nn.Linear(8, 2, bias=False)).bfloat16()
    module.append(torch.nn.Linear(2, 2, bias=False))
    module[1].requires_grad_(False)
    old, wrapped = OldMemory({}), DistributedDataParallel
    with old.used():
        wrapped.__init__(SimpleNamespace(), config=None, ddp_config=None, module=module)  # type: ignore[misc, arg-type]
    assert seen == [2, 32, 16], "what is frozen is not overwritten, and what is in 32 bits may be"
    assert old.nbytes == 64
    assert [tuple(each.shape) for each in module.parameters()] == [(8, 4), (2, 8), (2, 2)]
