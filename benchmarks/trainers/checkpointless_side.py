"""One rank under checkpointless: `checkpointless_side.py DIRECTORY STEPS FAULT`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.trainers.model import RANKS, Training
from checkpointless import HPWrapper, PlainTraining


@HPWrapper()
def main() -> None:
    """Train; after a fault this is entered again."""
    directory, steps, fault = sys.argv[1:]
    dist.init_process_group("gloo")
    own = Training(Path(directory), dist.get_rank(), fault)
    model = DistributedDataParallel(own.model)
    training = PlainTraining(modules=[model], optimizers=[own.optimizer])
    for step in training.steps(int(steps)):
        loss = own.loss(model, step)
        own.maybe_fail(step)
        loss.backward()
        training.update(loss.item())
        own.made(step, RANKS)
    own.end()
    dist.barrier()


if __name__ == "__main__":
    main()
