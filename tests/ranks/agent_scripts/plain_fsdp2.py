"""Train a small model with FSDP2 in a loop of one's own: ``STEPS REPLICAS SHARDS TENSOR_PARALLEL``."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from checkpointless import HPCallWrapper, HPWrapper, PlainTraining
from checkpointless.recovery import CheckpointManager, NeighborMemory

STEPS, REPLICAS, SHARDS, TENSOR_PARALLEL = map(int, sys.argv[1:5])
AVERAGED = "averaged" in sys.argv  # other weights take the places of the trained ones for an evaluation
MUON = "muon" in sys.argv
TIERS = [NeighborMemory(overlap=False)] if REPLICAS == 1 else []
WIDTH, VOCABULARY = 38, 101  # the shards are not even


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.down = torch.nn.Linear(3 * WIDTH, WIDTH)
        self.drop = torch.nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@HPWrapper(checkpoint_manager=CheckpointManager(tiers=TIERS))
def main(caller: HPCallWrapper) -> None:
    dist.init_process_group("gloo")
    names = ("replicate", "shard", "tensor")
    mesh = init_device_mesh("cpu", (REPLICAS, SHARDS, TENSOR_PARALLEL), mesh_dim_names=names)
    hsdp = mesh["replicate", "shard"]
    torch.manual_seed(1)
    model = Model()
    for block in model.blocks:
        if TENSOR_PARALLEL > 1:
            parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=hsdp)
    fully_shard(model, mesh=hsdp)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    optimizer = torch.optim.Muon(matrices) if MUON else torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    data_rank = dist.get_rank() // TENSOR_PARALLEL
    torch.manual_seed(100 + data_rank)  # ranks of one tensor-parallel group have the same batches and dropout
    with torch.no_grad():
        model(torch.zeros(1, 9, dtype=torch.int64))  # an evaluation leaves whole parameters in their places
    training = PlainTraining(caller, [model], [optimizer], schedulers=[scheduler])
    for step in training.steps(STEPS):
        for _ in range(2):  # gradients are accumulated
            caller.enter_phase("data", step)
            tokens = torch.randint(VOCABULARY, (4, 9))
            caller.enter_phase("forward", step)
            logits = model(tokens)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten()) / 2
            caller.enter_phase("backward", step)
            loss.backward()
        if TENSOR_PARALLEL == 1:  # torch does not clip parameters of different meshes together
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        training.update(loss.item())
        if TENSOR_PARALLEL == 1:  # else torch makes a mesh of both
            spread: list[Any] = [*model.parameters(), *(each["exp_avg"] for each in optimizer.state.values())]
            assert all(each.device_mesh is hsdp for each in spread), "a mesh of an earlier generation"
        if AVERAGED and dist.get_rank() < SHARDS:  # in one replica: the other one keeps the trained weights
            raw = [parameter.detach().clone() for parameter in model.parameters()]
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
            caller.enter_phase("between", step)
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), raw):
                    parameter.copy_(value)
    dist.barrier()


main()
