"""A loop that keeps the contract: ``STEPS KIND [undeclared]``, where what the loop keeps changes its gradients.

KIND: clip (a list of norms), average (a number), scaler (a loss scaler that overflows), draws (a generator),
workers (persistent ones, whose dataset draws), or optimizer (one with an attribute that changes its updates).

For rehearsals, in a folder with ``rows.txt``, with validations: exact, unseeded (the model is another one in each
run), raises (in step 3), slow (a step takes a second), or resumes (from what an earlier run has written at PATH).
"""

import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from checkpointless import HPWrapper, PlainTraining, Value, register_optimizer_state
from checkpointless.inprocess import HPCallWrapper
from checkpointless.recovery import seed_data_workers

STEPS, KIND = int(sys.argv[1]), sys.argv[2]
IS_DECLARED = "undeclared" not in sys.argv
IS_REHEARSED = KIND in ("exact", "unseeded", "raises", "slow", "resumes")


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 36

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), index / 36) + torch.randn(8)


class Paced(torch.optim.AdamW):
    """Takes smaller steps the larger the gradients of its past steps were."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1e-2)
        self.pace: dict[str, Any] = {"steps": 0, "mean": torch.zeros(())}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        grads = [each.grad.norm() for group in self.param_groups for each in group["params"]]
        self.pace["steps"] += 1
        self.pace["mean"] += (torch.stack(grads).mean() - self.pace["mean"]) / self.pace["steps"]
        for group in self.param_groups:
            group["lr"] = 1e-2 / (1.0 + float(self.pace["mean"]))
        super().step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "pace": self.pace}


if IS_DECLARED:
    register_optimizer_state(Paced, lambda each: each.pace, lambda each, pace: setattr(each, "pace", pace))


def batches(loader: Any, sampler: Any, done: int) -> Any:
    """Yield the batches of step ``done + 1`` and of those after it, epoch by epoch."""
    epoch, made = divmod(done, len(loader))
    while True:
        sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            if number >= made:
                yield batch
        epoch, made = epoch + 1, 0


def rows() -> Any:
    return torch.arange(float(Path("rows.txt").read_text())).reshape(-1, 8) / 100


def note(path: Path, step: int) -> None:
    if dist.get_rank() == 0:
        path.with_suffix(".new").write_text(str(step))
        path.with_suffix(".new").replace(path)  # the job may be stopped meanwhile


@HPWrapper()
def main(caller: HPCallWrapper) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1 if KIND != "unseeded" else time.time_ns() % 10**9)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)))
    make: Any = Paced if KIND == "optimizer" else functools.partial(torch.optim.AdamW, lr=1e-2)
    optimizer = make(model.parameters())
    torch.manual_seed(100 + dist.get_rank())
    norms: list[float] = []
    average: Any = Value(0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=100)
    generator = torch.Generator().manual_seed(dist.get_rank())
    state = {"norms": norms, "average": average, "generator": generator} if IS_DECLARED else {}
    training = PlainTraining(
        caller, [model], [optimizer], state=state, scaler=scaler if IS_DECLARED and KIND == "scaler" else None
    )
    sampler: Any = DistributedSampler(rows() if IS_REHEARSED else Noisy())
    workers: Any = {"num_workers": 1, "persistent_workers": True} if KIND == "workers" else {}
    size = 2 if IS_REHEARSED else 6
    loader = DataLoader(sampler.dataset, size, sampler=sampler, generator=torch.Generator(), **workers)
    seed_data_workers(loader, seed=7, rank=dist.get_rank())
    validation = DataLoader(sampler.dataset, 4, generator=torch.Generator())
    kept = Path((*sys.argv, "last.pt")[3])
    done = int(kept.read_text()) if KIND == "resumes" and kept.exists() else 0
    source = None
    for step in training.steps(done + STEPS, done=done):
        if IS_REHEARSED and step % 4 == 0:
            with torch.no_grad():
                print(f"validation: {sum(float(model.module(x).sum()) for x in validation)}", flush=True)
        if KIND == "raises" and step == 3:
            raise ValueError("the third step")
        time.sleep(1 if KIND == "slow" else 0)
        if KIND == "workers" or IS_REHEARSED:
            source = source or batches(loader, sampler, step - 1)
            x = next(source)
        else:
            x = torch.randn(4, 8, generator=generator if KIND == "draws" else None)
        caller.enter_phase("forward", step)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        if KIND == "scaler":
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.update()
        else:
            loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))
        norms.append(norm)
        average.value = 0.9 * average.value + 0.1 * norm
        if KIND == "clip":
            torch.nn.utils.clip_grad_norm_(model.parameters(), sorted(norms)[len(norms) // 2])
        if KIND == "average":
            for each in model.parameters():
                each.grad = each.grad * average.value if each.grad is not None else None
        training.update(loss.item())
        if IS_REHEARSED:
            note(kept, step)
    assert all(bool(each.isfinite().all()) for each in model.parameters())  # updates that overflow are left out
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"norms of {len(norms)} steps, {os.environ['WORLD_SIZE']} ranks", flush=True)


main()
