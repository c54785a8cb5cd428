"""Test which storage stands for a tensor in its plain form."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from checkpointless.state.module_tensors import TrainingTensors
from checkpointless.state.serialization.tensor_memory import local_part


@pytest.mark.usefixtures("alone")
def test_of_a_dtensor_it_is_the_shard_of_this_rank() -> None:
    spread = distribute_tensor(torch.zeros(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
    part = local_part(spread)
    assert type(part) is torch.Tensor
    part[1, 1] = 5.0
    assert spread.full_tensor()[1, 1] == 5.0


@pytest.mark.usefixtures("alone")
def test_a_module_of_dtensors_has_its_shards_under_its_keys() -> None:
    module = torch.nn.Linear(2, 4, bias=False)
    spread = distribute_tensor(module.weight.detach(), init_device_mesh("cpu", (1,)), [Shard(0)])
    module.weight = torch.nn.Parameter(spread)
    optimizer = torch.optim.AdamW(module.parameters())
    module.weight.grad = torch.ones_like(module.weight)
    optimizer.step()
    found = TrainingTensors([module], [optimizer]).tensors()
    assert {key[-1] for key in found} == {"weight", "exp_avg", "exp_avg_sq", "step"}
    assert {type(tensor) for tensor in found.values()} == {torch.Tensor}
