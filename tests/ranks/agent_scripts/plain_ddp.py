"""Train a model in torch's DDP, whose gradients fill several buckets: ``STEPS [static] [block|model BACKEND]``."""

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from checkpointless import HPCallWrapper, HPWrapper, PlainTraining

STEPS = int(sys.argv[1])
STATIC = "static" in sys.argv
COMPILED, BACKEND = (*sys.argv[2:], "", "")[:2]
BATCHES = 2  # per step
WIDTH = 400


class Block(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.relu(x))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.second = Block(WIDTH, WIDTH)
        self.drop = torch.nn.Dropout(0.1)
        self.norm = torch.nn.BatchNorm1d(WIDTH)
        self.last = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x))  # made before, used after: gradients are ready in another order
        return self.last(self.norm(self.drop(x)))


@HPWrapper()
def main(caller: HPCallWrapper) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    inner = Model()
    if COMPILED == "block":
        inner.second.compile(backend=BACKEND)
    model = DistributedDataParallel(inner, bucket_cap_mb=1, static_graph=STATIC)
    if COMPILED == "model":
        model.compile(backend=BACKEND)
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
if COMPILED:
    print(f"graphs: {torch._dynamo.utils.counters['stats']['unique_graphs']}")
