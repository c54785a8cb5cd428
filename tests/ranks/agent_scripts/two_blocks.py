"""Train in a block, and run another behind it: ``evaluate``; ``train`` once more; ``raise`` or ``kill`` in it."""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from checkpointless import HPCallWrapper, HPWrapper, PlainTraining

WHAT = sys.argv[1]
RANK = int(os.environ["RANK"])


@HPWrapper()
def train(steps: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    training = PlainTraining(modules=[model], optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)])
    for _ in training.steps(steps):
        loss = model(torch.randn(2, 4)).square().mean()
        loss.backward()
        training.update(loss.item())
    dist.barrier()
    dist.destroy_process_group()


@HPWrapper()
def evaluate(caller: HPCallWrapper) -> None:
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    if caller.generation == 1 and RANK == 1:
        if WHAT == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if WHAT == "raise":
            raise ValueError("in the second block")
    dist.barrier()
    print(
        f"rank {RANK} done in generation {caller.generation}, incarnation", os.environ["CHECKPOINTLESS_INCARNATION"]
    )


train(2)
if WHAT == "train":
    train(4)
else:
    evaluate()
