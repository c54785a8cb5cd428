"""Which ranks hold the same parts of DTensors, as their meshes and placements tell."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from checkpointless.state.module_tensors import HoldersByMesh, TrainingTensors, _spread_like
from checkpointless.state.serialization.tensor_memory import local_part
from checkpointless.transfer.rank_groups import Group, all_groups
from checkpointless.transfer.tensor_entry import TensorEntry

MESH = torch.arange(8).view(2, 2, 2)


def spread(*placements: Any, mesh: torch.Tensor = MESH) -> Any:
    """Return what stands for a DTensor: its layout is all that is asked for."""
    given = SimpleNamespace(mesh=mesh)
    return SimpleNamespace(to_local=None, device_mesh=given, placements=placements)


NORM, UP = (Replicate(), Shard(0), Replicate()), (Replicate(), Shard(0), Shard(0))
EVERYBODY = tuple(range(8))


@pytest.mark.parametrize(
    ("layouts", "rank", "each", "common", "plain"),
    [
        ([spread(Replicate(), Shard(0), Shard(1))], 6, [(2, 6)], (2, 6), (2, 6)),
        ([spread(*NORM), spread(*UP), spread(*NORM)], 6, [(2, 3, 6, 7), (2, 6), (2, 3, 6, 7)], (2, 6), (2, 6)),
        ([spread(Replicate(), Shard(0), mesh=MESH[:, :, 1]), torch.ones(2)], 5, [(1, 5), (1, 5)], (1, 5), (1, 5)),
        ([spread(Shard(0), mesh=torch.arange(4))], 3, [(3,)], (3,), (0, 1, 2, 3)),
        ([spread(Replicate(), mesh=torch.arange(4))], 3, [(0, 1, 2, 3)], (0, 1, 2, 3), (0, 1, 2, 3)),
        (
            [
                spread(Shard(0), Replicate(), mesh=MESH[0]),
                spread(Replicate(), Shard(0), mesh=MESH[0]),
                torch.ones(2),
            ],
            1,
            [(0, 1), (1, 3), (0, 1, 2, 3)],
            (1,),
            (0, 1, 2, 3),
        ),
        (
            [spread(Shard(0), mesh=MESH[0, 1]), spread(Shard(0), mesh=MESH[0, :, 0]), torch.ones(2)],
            2,
            [(2,), (2,), (2,)],
            (2,),
            (2,),
        ),
        ([torch.ones(2)], 1, [EVERYBODY], EVERYBODY, EVERYBODY),
        ([], 1, [], EVERYBODY, EVERYBODY),
    ],
    ids=[
        "HSDP and TP",
        "a norm has more holders",
        "a mesh of a part",
        "fully sharded",
        "DDP",
        "not nested",
        "meshes that cross",
        "plain",
        "nothing",
    ],
)
def test_the_ranks_along_dimensions_of_replicas_hold_the_same(
    layouts: list[Any], rank: int, each: list[Group], common: Group, plain: Group
) -> None:
    holders = HoldersByMesh(layouts, rank, 8)
    assert [holders.of(tensor) for tensor in layouts] == each
    assert (holders.all, holders.plain) == (common, plain)


@pytest.mark.parametrize("replicated", [{0}, {1}, {2}, {0, 1}, {0, 2}, {1, 2}, {0, 1, 2}], ids=str)
def test_all_ranks_tell_the_same_groups(replicated: set[int]) -> None:
    crossed = [spread(*(Replicate() if place in replicated else Shard(0) for place in range(3)))]
    crossed += [spread(Shard(0), Replicate(), Shard(0)), torch.ones(2)]
    told = {}
    for rank in range(8):
        holders = HoldersByMesh(crossed, rank, 8)
        told[rank] = tuple({holders.of(tensor) for tensor in crossed})
    assert all_groups(told)


def test_a_layout_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 9 is not in the mesh"):
        HoldersByMesh([spread(Replicate(), Shard(0), Shard(1))], 9, 10)
    with pytest.raises(ValueError, match="still to be reduced"):
        HoldersByMesh([spread(Partial(), Shard(0), Shard(1))], 0, 8)


@pytest.fixture
def parameter() -> Iterator[torch.nn.Parameter]:
    """Return a parameter that is a DTensor."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    yield torch.nn.Parameter(distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)]))
    dist.destroy_process_group()


def test_what_an_optimizer_keeps_is_like_its_parameter(parameter: torch.nn.Parameter) -> None:
    part = torch.ones(4, 3)
    made = _spread_like(part, parameter)
    assert isinstance(made, DTensor)
    assert local_part(made).data_ptr() == part.data_ptr()
    number = torch.tensor(3.0)
    assert _spread_like(number, parameter) is number
    assert _spread_like(part, torch.ones(4, 3)) is part


def test_an_optimizer_goes_on_with_state_that_was_adopted_or_filled(parameter: torch.nn.Parameter) -> None:
    module = torch.nn.Module()
    module.weight = parameter
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    local_part(parameter).fill_(1.0)
    parameter.grad = _spread_like(torch.ones(4, 3), parameter)
    optimizer.step()
    before = {key: tensor.clone() for key, tensor in TrainingTensors([module], [optimizer]).tensors().items()}
    assert all(type(tensor) is torch.Tensor for tensor in before.values())
    again = torch.optim.AdamW([parameter], lr=0.1)
    tensors = TrainingTensors([module], [again])
    places = tensors.allocate([TensorEntry.of(key, each) for key, each in before.items()], before)
    assert {key[-1] for key in before if places[key] is before[key]} == {"exp_avg", "exp_avg_sq", "step"}, (
        "the parameter is copied"
    )
    again.step()
    optimizer.step()
    first, second = optimizer.state[parameter]["exp_avg"], again.state[parameter]["exp_avg"]
    assert isinstance(second, DTensor)
    assert torch.equal(local_part(first), local_part(second))


def trained(parameter: torch.nn.Parameter) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a module with the parameter, and an optimizer that has made a step."""
    module = torch.nn.Module()
    module.weight = parameter
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.grad = _spread_like(torch.ones(4, 3), parameter)
    optimizer.step()
    return module, optimizer


def test_what_an_optimizer_keeps_of_its_own_part_comes_back_as_that(parameter: torch.nn.Parameter) -> None:
    module, optimizer = trained(parameter)
    optimizer.state[parameter]["own"] = torch.full((4, 3), 2.0)  # of the shape of the part, but no DTensor
    tensors = TrainingTensors([module], [optimizer])
    objects, held = tensors.capture()(), tensors.tensors()
    again = torch.optim.AdamW([parameter], lr=0.1)
    new = TrainingTensors([module], [again])
    new.allocate([TensorEntry.of(key, each) for key, each in held.items()], held)
    new.restore(objects)
    state = again.state[parameter]
    assert not isinstance(state["own"], DTensor)
    assert isinstance(state["exp_avg"], DTensor)
    again.step()


def test_a_state_that_is_divided_otherwise_is_unfit(parameter: torch.nn.Parameter) -> None:
    module, optimizer = trained(parameter)
    tensors = TrainingTensors([module], [optimizer])
    assert tensors.unfit() is None
    optimizer.state[parameter]["factor"] = parameter.detach().square().mean(-1, keepdim=True)
    reason = tensors.unfit()
    assert reason is not None
    assert "factor of parameter 0 is a DTensor that is divided otherwise" in reason


def test_buffers_may_be_dtensors(parameter: torch.nn.Parameter) -> None:
    module: Any = torch.nn.Module()
    module.register_buffer("mean", parameter.detach().clone())
    tensors = TrainingTensors([module], [])
    copies = tensors.buffers.take()
    (copy,) = copies.values()
    assert type(copy) is torch.Tensor
    local_part(module.mean).zero_()
    tensors.buffers.put(copies)
    assert torch.equal(local_part(module.mean), copy)
