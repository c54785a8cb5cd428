"""Train in a plain loop whose gradients are reduced while the backward pass goes on; several ranks may share a GPU.

checkpointless run --nproc-per-node 4 tests/gpu/loop.py --steps 6 --device cuda --dtype bf16 --backend staged
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # else the first step imports it, and a fault meanwhile leaves it half imported
import torch.distributed as dist
from torch import nn

from checkpointless import HPCallWrapper, HPWrapper, PlainTraining
from tests.gpu import staged

BATCH, WIDTH = 8, 64
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def options() -> argparse.Namespace:
    made = argparse.ArgumentParser()
    made.add_argument("--steps", type=int, default=6)
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--dtype", choices=tuple(DTYPES), default="fp32")
    made.add_argument("--backend", choices=(staged.BACKEND, "nccl"), default=staged.BACKEND)
    return made.parse_args()


torch.use_deterministic_algorithms(True)  # this imports, too: not in the block


@HPWrapper(abort_timeout=20.0)
def main(caller: HPCallWrapper) -> None:
    args = options()
    if args.device == "cuda":
        torch.cuda.set_device(0)
    staged.install()
    dist.init_process_group(args.backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 1))
    model.to(args.device, DTYPES[args.dtype])
    torch.manual_seed(100 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    training = PlainTraining(caller, [model], [optimizer])
    works: list[tuple[Any, nn.Parameter]] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reducing(works))
    for step in training.steps(args.steps):
        caller.enter_phase("forward", step)
        given = torch.randn(BATCH, WIDTH, device=args.device, dtype=DTYPES[args.dtype])
        loss = (model(given) - given.sin().sum(1, keepdim=True)).square().mean()
        caller.enter_phase("backward", step)
        loss.backward()
        caller.enter_phase("sync", step)
        while works:
            work, parameter = works.pop()
            work.wait()
            assert parameter.grad is not None
            parameter.grad /= ranks
        training.update(loss.item())
    dist.barrier()


def reducing(works: list[tuple[Any, nn.Parameter]]) -> Callable[[nn.Parameter], None]:
    """Return a hook that begins to reduce a gradient as soon as it is there, and notes the work."""

    def reduce(parameter: nn.Parameter) -> None:
        works.append((dist.all_reduce(parameter.grad, async_op=True), parameter))

    return reduce


if __name__ == "__main__":
    main()
    print(f"rank {os.environ['RANK']} is done", flush=True)
