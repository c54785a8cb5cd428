"""One rank under torchrun with a checkpoint per step: `checkpoint_side.py DIRECTORY STEPS FAULT`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.trainers.model import Training


def main() -> None:
    """Train in a process that torchrun starts again after a fault."""
    dist.init_process_group("gloo")
    train(*sys.argv[1:])
    dist.destroy_process_group()


def train(directory: str, steps: str, fault: str) -> None:
    """Resume from the checkpoint, if there is one, and train with the ranks that there are."""
    own = Training(Path(directory), dist.get_rank(), fault)
    checkpoint, done = Path(directory) / "last.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        own.model.load_state_dict(saved["model"])
        own.optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
    model = DistributedDataParallel(own.model)
    for step in range(done + 1, int(steps) + 1):
        loss = own.loss(model, step)
        own.maybe_fail(step)
        loss.backward()
        own.optimizer.step()
        own.optimizer.zero_grad()
        if own.rank == 0:
            state = {"model": own.model.state_dict(), "optimizer": own.optimizer.state_dict(), "step": step}
            torch.save(state, checkpoint.with_suffix(".tmp"))
            os.replace(checkpoint.with_suffix(".tmp"), checkpoint)
        own.made(step, dist.get_world_size())
    own.end()
    dist.barrier()


if __name__ == "__main__":
    main()
