"""Train under DDP, with a checkpoint of its own after every third step: ``restarts.py FOLDER STEPS``."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from checkpointless import HPWrapper, PlainTraining

FOLDER, STEPS = Path(sys.argv[1]), int(sys.argv[2])


@HPWrapper()
def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    done, saved = 0, FOLDER / "saved.pt"
    if saved.exists():
        kept = torch.load(saved)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        done = kept["step"]
    dist.barrier()
    training = PlainTraining(modules=[model], optimizers=[optimizer])
    for step in training.steps(STEPS, done=done):
        rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = (model(rows) - rows).pow(2).mean()
        loss.backward()
        training.update(loss.item())
        if step % 3 == 0 and dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, FOLDER / "new.pt")
            (FOLDER / "new.pt").rename(saved)
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), FOLDER / "final.pt")
    dist.barrier()


if __name__ == "__main__":
    main()
