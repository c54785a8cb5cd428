"""Groups of ranks: all members agree on them, and they travel in few bytes."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from checkpointless.integrations.torch.torch_tensors import _HoldersByMesh
from checkpointless.state.module_tensors import TrainingTensors, _spread_like
from checkpointless.state.port import split
from checkpointless.state.serialization.tensor_memory import local_part
from checkpointless.transfer.rank_groups import Group, all_groups, compact, expanded
from checkpointless.transfer.tensor_entry import TensorEntry
from tests.unit.recovery.made_up_state import BUFFER, MOMENTUM, WEIGHT, MadeUpState

ANY_GROUP = st.sets(st.integers(0, 40), min_size=1).map(lambda ranks: tuple(sorted(ranks)))


@st.composite
def along_a_mesh(draw: st.DrawFn) -> Group:
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    mesh = torch.arange(torch.Size(shape).numel()).view(shape)
    index = tuple(slice(None) if draw(st.booleans()) else draw(st.integers(0, size - 1)) for size in shape)
    return tuple(int(rank) for rank in mesh[index].flatten())


@given(st.lists(st.one_of(ANY_GROUP, along_a_mesh()), max_size=5))
def test_what_travels_is_the_same_group(groups: list[Group]) -> None:
    told = json.loads(json.dumps([compact(group) for group in groups]))
    assert expanded([[], told, *[[]] * 298])[1] == tuple(groups)


@pytest.mark.parametrize(
    "group",
    [
        tuple(range(4096)),
        tuple(range(3, 4096, 8)),
        tuple(rank for rank in range(4096) if rank % 64 < 8 and rank % 2),
    ],
    ids=["all", "every eighth", "two dimensions"],
)
def test_thousands_of_ranks_along_a_mesh_take_few_bytes(group: Group) -> None:
    told = json.dumps(compact(group))
    assert len(told) < 60
    assert expanded([[json.loads(told)]] * 4096)[4095] == (group,)


@pytest.mark.parametrize("told", [{"first": 0, "by": [[1, 10**9], [1, 10**9]]}, [0, 1, 2]])
def test_a_group_of_more_ranks_than_there_are_takes_no_memory(told: object) -> None:
    with pytest.raises(ValueError, match="was reported, and there are 2"):
        expanded([[told], []])


@given(st.lists(st.sets(st.sampled_from(range(6)), min_size=1), min_size=1, max_size=6))
def test_groups_are_taken_if_all_members_tell_them_and_only_then(drawn: list[set[int]]) -> None:
    groups = {tuple(sorted(ranks)) for ranks in drawn} | {tuple(range(6))}
    parts = {rank: [group for group in sorted(groups) if rank in group] for rank in range(6)}
    assert all_groups(parts) == sorted(groups)
    for rank, group in itertools.product(parts, groups):
        other = [each for each in parts[rank] if each != group] if rank in group else [*parts[rank], group]
        if len(group) > 1 or rank not in group:
            with pytest.raises(ValueError, match=r"contradict each other|is in no replica group"):
                all_groups({**parts, rank: other})


def test_a_state_is_split_by_its_holders() -> None:
    live = MadeUpState(3)
    live.held_by = {WEIGHT: (0, 1, 2, 3)}
    parts = split(live, live.present)
    found = {group: list(tensors) for group, tensors in parts.items()}
    assert found == {(0, 1): [BUFFER, MOMENTUM], (0, 1, 2, 3): [WEIGHT]}
    assert live.groups() == {(0, 1): "model.0.buffer", (0, 1, 2, 3): "model.0.weight"}
    assert live.holders([WEIGHT]) == (0, 1, 2, 3)
    assert live.holders([WEIGHT, BUFFER]) == live.holders([]) == (0, 1)


def test_a_tensor_in_no_part_or_in_two_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    live = MadeUpState(3)
    for wrong in ({(0, 1): [WEIGHT, BUFFER]}, {(0, 1): [WEIGHT, BUFFER, MOMENTUM], (1,): [WEIGHT]}):
        monkeypatch.setattr(live, "replica_groups", lambda keys, wrong=wrong: wrong)
        with pytest.raises(RuntimeError, match=r"replica_groups\(\) divides 3 keys into [24]"):
            split(live, live.present)


MESH = torch.arange(8).view(2, 2, 2)


def spread(*placements: Any, mesh: torch.Tensor = MESH) -> Any:
    """Return what stands for a DTensor: its layout is all that is asked for."""
    given = SimpleNamespace(mesh=mesh)
    return SimpleNamespace(to_local=None, device_mesh=given, placements=placements)


NORM, UP = (Replicate(), Shard(0), Replicate()), (Replicate(), Shard(0), Shard(0))
EVERYBODY, PLAIN = tuple(range(8)), torch.ones(2)


@pytest.mark.parametrize(
    ("layouts", "rank", "each", "common", "plain"),
    [
        ([spread(Replicate(), Shard(0), Shard(1))], 6, [(2, 6)], (2, 6), (2, 6)),
        ([spread(*NORM), spread(*UP), spread(*NORM)], 6, [(2, 3, 6, 7), (2, 6), (2, 3, 6, 7)], (2, 6), (2, 6)),
        ([spread(Replicate(), Shard(0), mesh=MESH[:, :, 1]), torch.ones(2)], 5, [(1, 5), (1, 5)], (1, 5), (1, 5)),
        ([spread(Shard(0), mesh=torch.arange(4))], 3, [(3,)], (3,), (0, 1, 2, 3)),
        ([spread(Replicate(), mesh=torch.arange(4))], 3, [(0, 1, 2, 3)], (0, 1, 2, 3), (0, 1, 2, 3)),
        (
            [*(spread(*dims, mesh=MESH[0]) for dims in ((Shard(0), Replicate()), (Replicate(), Shard(0)))), PLAIN],
            *(1, [(0, 1), (1, 3), (0, 1, 2, 3)], (1,), (0, 1, 2, 3)),
        ),
        (
            [spread(Shard(0), mesh=MESH[0, 1]), spread(Shard(0), mesh=MESH[0, :, 0]), PLAIN],
            *(2, [(2,), (2,), (2,)], (2,), (2,)),
        ),
        ([torch.ones(2)], 1, [EVERYBODY], EVERYBODY, EVERYBODY),
        ([], 1, [], EVERYBODY, EVERYBODY),
    ],
    ids=[
        *("HSDP and TP", "a norm has more holders", "a mesh of a part", "fully sharded", "DDP", "not nested"),
        *("meshes that cross", "plain", "nothing"),
    ],
)
def test_replicas_hold_the_same(layouts: Any, rank: int, each: list[Group], common: Group, plain: Group) -> None:
    holders = _HoldersByMesh(layouts, rank, 8)
    assert [holders.of(tensor) for tensor in layouts] == each
    assert (holders.all, holders.plain) == (common, plain)


@pytest.mark.parametrize("replicated", [{0}, {1}, {2}, {0, 1}, {0, 2}, {1, 2}, {0, 1, 2}], ids=str)
def test_all_ranks_tell_the_same_groups(replicated: set[int]) -> None:
    crossed = [spread(*(Replicate() if place in replicated else Shard(0) for place in range(3)))]
    crossed += [spread(Shard(0), Replicate(), Shard(0)), torch.ones(2)]
    holders = {rank: _HoldersByMesh(crossed, rank, 8) for rank in range(8)}
    assert all_groups({rank: tuple({each.of(tensor) for tensor in crossed}) for rank, each in holders.items()})


@pytest.fixture
def parameter(alone: None) -> torch.nn.Parameter:
    mesh = init_device_mesh("cpu", (1,))
    return torch.nn.Parameter(distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)]))


def trained(parameter: torch.nn.Parameter) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a module with the parameter, and an optimizer that has made a step."""
    module = torch.nn.Module()
    module.weight = parameter
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.grad = _spread_like(torch.ones(4, 3), parameter)
    optimizer.step()
    return module, optimizer


def test_an_optimizer_goes_on_with_state_that_was_adopted_or_filled(parameter: torch.nn.Parameter) -> None:
    module, optimizer = trained(parameter)
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
    assert "factor of parameter 0 is a DTensor that is divided otherwise" in str(tensors.unfit())


def test_of_a_dtensor_it_is_the_shard_of_this_rank(parameter: torch.nn.Parameter) -> None:
    spread: Any = parameter.detach()
    part = local_part(spread)
    assert type(part) is torch.Tensor
    part[1, 1] = 5.0
    assert spread.full_tensor()[1, 1] == 5.0


def test_a_module_of_dtensors_has_its_shards_under_its_keys(parameter: torch.nn.Parameter) -> None:
    module, optimizer = trained(parameter)
    found = TrainingTensors([module], [optimizer]).tensors()
    assert {key[-1] for key in found} == {"weight", "exp_avg", "exp_avg_sq", "step"}
    assert {type(tensor) for tensor in found.values()} == {torch.Tensor}
