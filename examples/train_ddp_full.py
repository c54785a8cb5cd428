"""Train a classifier with DDP as a job does: workers, bf16, a schedule, validations, TensorBoard, checkpoints.

Start it with ``checkpointless run --nproc-per-node 2 train_ddp_full.py``.
"""

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from checkpointless import HPWrapper, PlainTraining
from checkpointless.recovery import seed_data_workers

WIDTH, CLASSES, BATCH = 16, 4, 8


class Points(Dataset):
    """Points around one center per class, with other noise whenever one is read."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.centers = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.centers[index % CLASSES] + torch.randn(WIDTH), index % CLASSES


@torch.no_grad()
def validate(model: torch.nn.Module, loader: DataLoader, device: torch.device) -> float:
    """Return the share of points that the model puts into the right class, over all ranks."""
    model.eval()
    right = torch.zeros(2, device=device)
    for x, y in loader:
        right[0] += (model(x.to(device)).argmax(1) == y.to(device)).sum()
        right[1] += len(y)
    model.train()
    dist.all_reduce(right)
    return (right[0] / right[1]).item()


class ResumableSampler(DistributedSampler):
    """Leaves out the first ``skip`` samples of an epoch."""

    skip = 0

    def __iter__(self) -> Iterator[int]:
        return islice(super().__iter__(), self.skip, None)


def batches(loader: DataLoader, sampler: ResumableSampler, done: int) -> Iterator[Any]:
    """Yield the batch of step ``done + 1`` and those of the steps after it, epoch by epoch."""
    epoch, made = divmod(done, len(loader))
    while True:
        sampler.set_epoch(epoch)
        sampler.skip = made * BATCH
        yield from loader
        epoch, made = epoch + 1, 0


@HPWrapper()
def main() -> None:
    """Build everything and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3, help="epochs to train (default: 3)")
    parser.add_argument("--checkpoint", type=Path, help="file to resume from, and to save to after each epoch")
    parser.add_argument("--tensorboard", help="folder for TensorBoard")
    options = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(1)
    net = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, CLASSES)
    ).to(device)
    data, held_out = Points(160), Points(64)
    sampler = ResumableSampler(data)
    loader = DataLoader(data, BATCH, sampler=sampler, num_workers=2, drop_last=True, generator=torch.Generator())
    seed_data_workers(loader, seed=1, rank=rank)
    validation = DataLoader(held_out, BATCH, sampler=DistributedSampler(held_out, shuffle=False))
    steps = options.epochs * len(loader)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    parts: dict[str, Any] = {"net": net, "optimizer": optimizer, "scheduler": scheduler}
    done = 0
    if options.checkpoint and options.checkpoint.exists():
        saved = torch.load(options.checkpoint, map_location=device)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        done = saved["step"]
    model = DistributedDataParallel(net)
    torch.manual_seed(100 + rank)  # ranks drop out different units
    training = PlainTraining(modules=[model], optimizers=[optimizer], schedulers=[scheduler])
    writer = stream = None

    def validate_and_save(step: int) -> None:
        accuracy = validate(net, validation, device)
        if rank == 0:
            print(f"step {step}: {accuracy:.0%} right", flush=True)
            if writer:
                writer.add_scalar("accuracy", accuracy, step)
            if options.checkpoint:
                draft = options.checkpoint.with_suffix(".draft")
                torch.save({"step": step, **{name: part.state_dict() for name, part in parts.items()}}, draft)
                draft.replace(options.checkpoint)

    for step in training.steps(steps, done=done):
        if stream is None:  # the first step of this entry into main()
            stream = batches(loader, sampler, step - 1)
            if options.tensorboard and rank == 0:
                from torch.utils.tensorboard import SummaryWriter

                writer = SummaryWriter(options.tensorboard, purge_step=step)
        if step > 1 and (step - 1) % len(loader) == 0:
            validate_and_save(step - 1)
        x, y = next(stream)
        with torch.autocast(device.type, torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if writer:
            writer.add_scalar("loss", loss.item(), step)
            writer.flush()
        training.update(loss.item())
    validate_and_save(steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
