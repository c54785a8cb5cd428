"""Test what ``keep`` finds about the training that uses what was built."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from checkpointless import keep
from checkpointless.recovery.rng import RngStates
from checkpointless.recovery.training import kept as kept_module
from checkpointless.recovery.training.built import Builder, BuiltParts
from checkpointless.recovery.training.kept import KeptParts
from checkpointless.recovery.training.torch_tensors import TorchTensors


def parts_of(*returned: object) -> BuiltParts:
    streams = RngStates.capture()
    return BuiltParts(Builder(lambda: None), returned, (streams, streams))


def optimizer_of(*modules: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([each for module in modules for each in module.parameters()])


def kept(
    parts: BuiltParts, modules: list[torch.nn.Module], optimizers: list[Any], is_warm: bool = False
) -> KeptParts:
    tensors = [each for module in modules for each in module.parameters()]
    return KeptParts([parts], [is_warm], modules, tensors, optimizers)


def test_outside_of_a_block_all_is_built() -> None:
    calls: list[int] = []

    def build() -> torch.nn.Module:
        calls.append(1)
        return torch.nn.Linear(1, 1)

    assert keep(build) is not keep(build)
    assert len(calls) == 2


def test_a_model_beside_the_training_is_kept_as_long_as_nobody_writes_to_it() -> None:
    """A teacher, whose weights no recovery restores."""
    student, teacher = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer = optimizer_of(student)
    parts = parts_of(student, teacher, optimizer)
    found = kept(parts, [student], [optimizer])
    assert found.overwritten() == ""
    student(teacher(torch.ones(1, 2))).sum().backward()
    optimizer.step()
    assert found.unfit() is None
    with torch.no_grad():
        teacher.bias.add_(1)
    assert found.unfit() == "bias is no part of the training, and was written to"


def test_an_optimizer_that_is_not_the_trainings() -> None:
    model = torch.nn.Linear(2, 2)
    used, other = optimizer_of(model), optimizer_of(model)
    assert kept(parts_of(model, other), [model], [used]).unfit() == (
        "an optimizer that keep() returned is none of the training's"
    )
    assert kept(parts_of(model, used), [model], [used]).unfit() is None


def test_weights_that_are_set_behind_keep_are_no_reason_to_fill_a_rank_that_has_just_built_them() -> None:
    for is_warm in (False, True):
        model = torch.nn.Linear(2, 2)
        optimizer = optimizer_of(model)
        parts = parts_of(model, optimizer)
        model.load_state_dict(torch.nn.Linear(2, 2).state_dict())
        found = kept(parts, [model], [optimizer], is_warm)
        assert bool(found.overwritten()) == is_warm
        assert found.unfit() == "weight is written to between keep() and the first step"


def test_a_compiled_model_is_built_anew() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = optimizer_of(model)
    compiled: Any = torch.compile(model)
    assert kept(parts_of(model, optimizer), [compiled], [optimizer]).unfit() == "a module is compiled"


class Call:
    """Stands for the running wrapper."""

    generation = 1


def test_only_the_first_synchronisation_of_what_keep_returned_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may wrap a model of its own meanwhile, on this rank sooner than on another."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    asked: list[bool] = []
    call = Call()
    monkeypatch.setattr(kept_module, "active_call_wrapper", lambda: call)

    def all_keep(_: object, are_kept: bool) -> bool:
        asked.append(are_kept)
        return True

    monkeypatch.setattr(kept_module, "all_keep", all_keep)
    model = torch.nn.Linear(2, 2)
    entry = kept_module._Entry(cast(Any, call))
    entry.add(parts_of(model), True)
    try:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(DistributedDataParallel, torch.nn.Linear(2, 2)).result()
        assert asked == []
        DistributedDataParallel(torch.nn.Sequential(model, torch.nn.BatchNorm1d(2)))
        assert asked == [False]
        DistributedDataParallel(model)
        assert asked == [False, True]
    finally:
        entry.sync.end()
        dist.destroy_process_group()


def test_a_state_that_the_moment_does_not_have_is_dropped() -> None:
    """A rank that was a step ahead has it, where the others have none yet."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.Linear(2, 2)
    optimizer = optimizer_of(model)
    tensors = TorchTensors([model], [optimizer], is_known=True, group=(0,))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["note"] = 1
    optimizer.state[model.bias]["note"] = 1
    weight, bias = (("optimizer", 0, 0, at) for at in range(2))
    tensors.drop_states({(*weight, "exp_avg"), (*weight, "step")}, {bias: {"note": 1}})
    assert optimizer.state[model.weight].keys() == {"exp_avg", "step"}
    assert optimizer.state[model.bias].keys() == {"note"}
    dist.destroy_process_group()


def test_modules_that_are_sharded_in_place_are_built_anew() -> None:
    """Whether ``build`` does so, or the script behind ``keep``."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    model = torch.nn.Linear(2, 2)
    parts = parts_of(model)
    fully_shard(model, mesh=mesh)
    assert "FSDPLinear 0" in str(kept(parts, [model], []).unfit())
    assert parts_of(model).obstacle == "build makes DTensors, which refer to process groups"
    dist.destroy_process_group()
