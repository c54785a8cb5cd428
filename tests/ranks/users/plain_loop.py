"""Train in a loop as users write it: with batch normalisation and an order drawn where the block begins.

checkpointless run --nproc-per-node 3 tests/ranks/users/plain_loop.py --steps 6 --features batchnorm,randperm
"""

import argparse
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from checkpointless import HPCallWrapper, HPWrapper, PlainTraining
from tests.ranks.users import defects, end

SAMPLES, BATCH, WIDTH = 64, 4, 8
LARGE = 2 << 20  # floats
#: ``--features`` takes these.
FEATURES = (
    "batchnorm",  # keeps running statistics in buffers
    "own-buffers",  # does not broadcast them: those of every rank are of its own samples
    "large-buffers",  # adds one that differs from rank to rank and is too large to be kept
    "randperm",  # the order of the samples is drawn in the block, from the streams that the script has seeded
)

random.seed(7)  # many scripts do it here: once, when the module is loaded
np.random.seed(7)
torch.manual_seed(7)


@HPWrapper()
def main(caller: HPCallWrapper) -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=6)
    options.add_argument("--features", type=lambda text: [word for word in text.split(",") if word], default=[])
    args = options.parse_args()
    defects.install()
    end.note("process", fit=0)
    order = torch.randperm(SAMPLES) if "randperm" in args.features else torch.arange(SAMPLES)
    drawn = random.sample(range(SAMPLES), 5) + np.random.permutation(SAMPLES)[:5].tolist()
    end.note("order", fit=0, order=order.tolist() + drawn)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    norm = nn.BatchNorm1d(WIDTH) if "batchnorm" in args.features else nn.LayerNorm(WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Dropout(0.1), nn.Linear(WIDTH, 1))
    if "large-buffers" in args.features:
        model.register_buffer("large", torch.zeros(LARGE))
    data = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(2))
    target = data.sin().sum(1, keepdim=True)
    torch.manual_seed(100 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    training = PlainTraining(caller, [model], [optimizer])
    for step in training.steps(args.steps):
        for buffer in model.buffers() if "own-buffers" not in args.features else ():  # as DDP does
            dist.broadcast(buffer, 0)
        place = ((step - 1) * ranks + rank) * BATCH
        ids = order[[index % SAMPLES for index in range(place, place + BATCH)]]
        end.note("samples", fit=0, step=step, ids=ids.tolist())
        loss = (model(data[ids]) - target[ids]).square().mean()
        if "large-buffers" in args.features:
            model.get_buffer("large").add_(loss.item())
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks
        training.update(loss.item())
    dist.barrier()
    end.write_end(
        {
            "parameters": dict(model.named_parameters()),
            "buffers": dict(model.named_buffers()),
            "optimizer": end.digest(training.state.shard().values()),
            "random": {"torch": end.digest([torch.get_rng_state()])},
        }
    )


main()
