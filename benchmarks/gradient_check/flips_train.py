"""Train a small transformer in DDP with all steps but few checked, or all: ``STEPS EVERY``."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gradient_check.model import build, loss_of
from checkpointless import HPCallWrapper, HPWrapper, PlainTraining

STEPS, EVERY = int(sys.argv[1]), int(sys.argv[2])
WIDTH, LAYERS, VOCABULARY, ROWS, TOKENS = 32, 2, 64, 4, 8


@HPWrapper()
def main(caller: HPCallWrapper) -> None:
    """Train."""
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(build(WIDTH, LAYERS, VOCABULARY))
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(100 + dist.get_rank())
    training = PlainTraining(caller, [model], [optimizer], sdc_check_every=EVERY)

    def compute(tokens: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, tokens)
        loss.backward()
        return loss

    for _ in training.steps(STEPS):
        loss = training.checked(partial(compute, torch.randint(VOCABULARY, (ROWS, TOKENS))))
        training.update(loss.item())
    dist.barrier()


main()
