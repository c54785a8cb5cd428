"""A loop over epochs with a validation, for rehearsals: ``STEPS KIND [PATH]``, run in a folder with ``rows.txt``.

KIND: exact, unseeded (the model is another one in each run), raises (in step 3), slow (a step takes a second), or
resumes (from what an earlier run has written at PATH).
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from checkpointless import HPWrapper, PlainTraining
from checkpointless.recovery import seed_data_workers

STEPS, KIND = int(sys.argv[1]), sys.argv[2]


def batches(loader: Any, sampler: Any, done: int) -> Any:
    """Yield the batches of step ``done + 1`` and of those after it, epoch by epoch."""
    epoch, made = divmod(done, len(loader))
    while True:
        sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            if number >= made:
                yield batch
        epoch, made = epoch + 1, 0


@HPWrapper()
def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1 if KIND != "unseeded" else time.time_ns() % 10**9)
    rows: Any = torch.arange(float(Path("rows.txt").read_text())).reshape(-1, 4) / 100
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kept = Path((*sys.argv, "last.pt")[3])
    done = int(kept.read_text()) if KIND == "resumes" and kept.exists() else 0
    training = PlainTraining(modules=[model], optimizers=[optimizer])
    sampler: Any = DistributedSampler(rows)
    loader = DataLoader(rows, 2, sampler=sampler, generator=torch.Generator())
    seed_data_workers(loader, seed=7, rank=dist.get_rank())
    validation = DataLoader(rows, 4, generator=torch.Generator())
    source = None
    for step in training.steps(done + STEPS, done=done):
        if step % 4 == 0:
            with torch.no_grad():
                print(f"validation: {sum(float(model.module(x).sum()) for x in validation)}", flush=True)
        source = source or batches(loader, sampler, step - 1)
        x = next(source)
        if KIND == "raises" and step == 3:
            raise ValueError("the third step")
        if KIND == "slow":
            time.sleep(1)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        training.update(loss.item())
        if dist.get_rank() == 0:
            kept.with_suffix(".new").write_text(str(step))
            kept.with_suffix(".new").replace(kept)  # the job may be stopped meanwhile
    dist.barrier()


main()
