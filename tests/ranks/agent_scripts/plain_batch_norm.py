"""Train a network with batch normalisation in a loop of one's own: ``STEPS``."""

import sys

import torch
import torch.distributed as dist

from checkpointless import HPCallWrapper, HPWrapper, PlainTraining

STEPS = int(sys.argv[1])


@HPWrapper()
def main(caller: HPCallWrapper) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    training = PlainTraining(caller, [model], [optimizer])
    for _ in training.steps(STEPS):
        loss = (model(torch.randn(8, 4)) ** 2).mean()
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        training.update(loss.item())
    dist.barrier()


main()
