"""A loop of one's own that goes on from its own checkpoint: ``FOLDER STEPS EVERY [uneven] [repeats]``.

A checkpoint is written after each EVERY steps, so after a fault the function loads another one than at the start.
With ``repeats`` no step draws from streams, which begin once more when the whole job does.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from checkpointless import HPWrapper, PlainTraining

PATH, STEPS, EVERY = Path(sys.argv[1], "checkpoint.pt"), int(sys.argv[2]), int(sys.argv[3])
REPEATS = "repeats" in sys.argv


@HPWrapper()
def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    inner = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Dropout(0.2 * (not REPEATS)), torch.nn.Linear(16, 1)
    )
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    done = 0
    if PATH.exists():
        saved = torch.load(PATH)
        parts: tuple[Any, ...] = (inner, optimizer, scheduler)
        for part, state in zip(parts, saved["parts"], strict=True):
            part.load_state_dict(state)
        done = saved["step"]
    if "uneven" in sys.argv:
        done += dist.get_rank()
    model = DistributedDataParallel(inner)
    torch.manual_seed(100 + dist.get_rank())
    training = PlainTraining(modules=[model], optimizers=[optimizer], schedulers=[scheduler])

    def save(step: int) -> None:
        if dist.get_rank() == 0:
            draft = PATH.with_suffix(".draft")
            torch.save(
                {"step": step, "parts": [each.state_dict() for each in (inner, optimizer, scheduler)]}, draft
            )
            draft.replace(PATH)

    for step in training.steps(STEPS, done=done):
        if step % EVERY == 1 and step > 1:
            save(step - 1)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step) if REPEATS else None)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        training.update(loss.item())
    save(STEPS)
    dist.barrier()


main()
