"""Train a model in torch's DDP, whose gradients fill several buckets: ``STEPS [static]``."""

import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from checkpointless import HPCallWrapper, HPWrapper, PlainTraining

STEPS = int(sys.argv[1])
STATIC = "static" in sys.argv
BATCHES = 2  # per step
WIDTH = 400


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.second = torch.nn.Linear(WIDTH, WIDTH)
        self.drop = torch.nn.Dropout(0.1)
        self.norm = torch.nn.BatchNorm1d(WIDTH)
        self.last = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.relu(self.first(x)))  # made before, used after: gradients are ready in another order
        return self.last(self.norm(self.drop(x)))


@HPWrapper()
def main(caller: HPCallWrapper) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(Model(), bucket_cap_mb=1, static_graph=STATIC)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    torch.manual_seed(100 + dist.get_rank())
    training = PlainTraining(caller, [model], [optimizer], schedulers=[scheduler])
    for step in training.steps(STEPS):
        for batch in range(BATCHES):
            caller.enter_phase("data", step)
            x = torch.randn(8, WIDTH)
            caller.enter_phase("forward", step)
            with nullcontext() if batch == BATCHES - 1 else model.no_sync():
                loss = (model(x) - x.roll(1, 1)).square().mean() / BATCHES
                caller.enter_phase("backward", step)
                loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        training.update(loss.item())
    dist.barrier()


main()
print(f"rank {os.environ['RANK']} is done", flush=True)
