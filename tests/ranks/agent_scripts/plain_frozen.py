"""Train in a loop of one's own, with parameters that are frozen at first: ``STEPS WHAT``.

``norm`` freezes none, and has a batch normalization.
``frees`` trains them from step 4 on, and freezes others from step 7 on; ``late`` does so behind the update of step
4. ``adds`` gives the optimizer more in step 4.
"""

import sys

import torch
import torch.distributed as dist

from checkpointless import HPWrapper, PlainTraining

STEPS, WHAT, WIDTH = int(sys.argv[1]), sys.argv[2], 16


@HPWrapper()
def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    between = torch.nn.BatchNorm1d(WIDTH) if WHAT == "norm" else torch.nn.ReLU()
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), between, torch.nn.Linear(WIDTH, WIDTH))
    model[0].requires_grad_(WHAT == "norm")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + dist.get_rank())
    training = PlainTraining(modules=[model], optimizers=[optimizer])
    for step in training.steps(STEPS):
        if step == 4 and WHAT == "frees":
            model[0].requires_grad_(True)
        elif step == 7 and WHAT == "frees":
            model[2].bias.requires_grad_(False)
        elif step == 4 and WHAT == "adds":
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
        batch = torch.randn(4, WIDTH)
        loss = (model(batch) - batch.roll(1, 1)).square().mean()
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        training.update(loss.item())
        if step == 4 and WHAT == "late":
            model[0].requires_grad_(True)
    dist.barrier()


main()
