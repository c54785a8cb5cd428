"""Seed at the top of the script, and shuffle, initialise and train in a loop in the block: ``STEPS``."""

import os
import random
import sys

import numpy as np
import torch
import torch.distributed as dist

from checkpointless import HPCallWrapper, HPWrapper, PlainTraining

STEPS, FEATURES = int(sys.argv[1]), 4
random.seed(7)
np.random.seed(7)
torch.manual_seed(7)


@HPWrapper()
def main(caller: HPCallWrapper) -> None:
    dist.init_process_group("gloo")
    order = torch.randperm(100).tolist()
    pairs = random.sample(range(100), 5) + np.random.permutation(100)[:5].tolist()
    print(f"order {order[:5] + pairs} in generation {caller.generation}", flush=True)
    model = torch.nn.Linear(FEATURES, 1)
    training = PlainTraining(caller, [model], [torch.optim.AdamW(model.parameters(), lr=1e-2)])
    for step in training.steps(STEPS):
        inputs = torch.arange(FEATURES) * (order[step] + int(os.environ["RANK"])) / 100
        loss = (model(inputs) + torch.rand(())).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        training.update(loss.item())
    dist.barrier()


main()
