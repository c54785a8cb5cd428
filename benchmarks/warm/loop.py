"""A loop of one's own over DDP with 52 million parameters: `loop.py DIRECTORY STEPS warm|anew`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from checkpointless import HPCallWrapper, HPWrapper, PlainTraining, keep

if TYPE_CHECKING:
    from benchmarks.common import Marks
    from benchmarks.warm.memory import forget_peak, peak_bytes
else:  # the ranks may be another checkout's: of this one, only these two folders are on their path
    from common import Marks
    from memory import forget_peak, peak_bytes

DIRECTORY, STEPS, IS_WARM = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "warm"
WIDTH, LAYERS, BATCH = 2560, 8, 4


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    layers: list[torch.nn.Module] = []
    for _ in range(LAYERS):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Dropout(0.1)]
    model = torch.nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


@HPWrapper()
def main(caller: HPCallWrapper) -> None:
    dist.init_process_group("gloo")
    marks = Marks(DIRECTORY, dist.get_rank())
    torch.manual_seed(1)
    inner, optimizer = keep(build, warm=IS_WARM)
    model = DistributedDataParallel(inner, gradient_as_bucket_view=True)
    torch.manual_seed(100 + dist.get_rank())
    training = PlainTraining(caller, [model], [optimizer])
    begun = False
    for step in training.steps(STEPS):
        if not begun:
            begun = True
            marks.write("begun", peak=peak_bytes(), pid=os.getpid())
            forget_peak()
        x = torch.randn(BATCH, WIDTH)
        loss = (model(x) - x).square().mean()
        caller.enter_phase("backward", step)
        loss.backward()
        training.update(loss.item())
        marks.write("step", step=step, peak=peak_bytes(), pid=os.getpid())
        forget_peak()
    dist.barrier()


if __name__ == "__main__":
    main()
