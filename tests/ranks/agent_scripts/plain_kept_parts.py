"""Keep an optimizer or a wrapper, but not the module that it is made for: ``STEPS WORD``.

``global``, ``closure``, ``method``: the optimizer alone is kept, and finds the module there. ``around``: a module
around another is kept, and the optimizer takes the parameters of the inner one. ``both``: the module is kept, too.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from checkpointless import HPCallWrapper, HPWrapper, PlainTraining, keep

STEPS, WORD = int(sys.argv[1]), sys.argv[2]
WIDTH = 16
model: torch.nn.Module


class Parts:
    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.module.parameters(), lr=1e-2)


def build_module() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.1), torch.nn.Linear(WIDTH, WIDTH))


def build_optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@HPWrapper()
def main(caller: HPCallWrapper) -> None:
    global model
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = inner = keep(build_module) if WORD == "both" else build_module()
    if WORD == "around":
        model = keep(lambda: torch.nn.Sequential(inner))
    if WORD == "method":
        optimizer = keep(Parts(inner).optimizer)
    elif WORD == "global":
        optimizer = keep(build_optimizer)
    elif WORD == "around":
        optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-2)
    else:
        optimizer = keep(lambda: torch.optim.AdamW(inner.parameters(), lr=1e-2))
    wrapped = DistributedDataParallel(model)
    torch.manual_seed(100 + dist.get_rank())
    training = PlainTraining(caller, [wrapped], [optimizer])
    for step in training.steps(STEPS):
        x = torch.randn(8, WIDTH)
        caller.enter_phase("forward", step)
        loss = (wrapped(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        training.update(loss.item())
    dist.barrier()


main()
print(f"rank {os.environ['RANK']} is done", flush=True)
