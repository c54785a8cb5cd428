"""Train a small language model with FSDP2 as a job does: replicas, bf16, a schedule, validations, TensorBoard, DCP.

Start it with ``checkpointless run --nproc-per-node 4 train_fsdp2_full.py``.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from checkpointless import HPWrapper, PlainTraining

TOKENS, LENGTH, WIDTH, BATCH, EVERY = 64, 32, 32, 4, 10


def batch_of(step: int, rank: int, device: str) -> torch.Tensor:
    """Return the tokens of a rank's step: each row counts up from a random number."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    first = torch.randint(TOKENS, (BATCH, 1), generator=generator)
    return ((first + torch.arange(LENGTH + 1)) % TOKENS).to(device)


class Net(torch.nn.Module):
    """An embedding, two transformer layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(TOKENS, WIDTH)
        layers = [torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.1, batch_first=True) for _ in range(2)]
        self.layers = torch.nn.Sequential(*layers)
        self.head = torch.nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of each next token's prediction, averaged."""
        logits = self.head(self.layers(self.embedding(tokens[:, :-1])))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def state_of(model: Net, optimizer: torch.optim.Optimizer, scheduler: LRScheduler, step: int) -> dict[str, Any]:
    """Return what belongs into a checkpoint, in the form that DCP saves and loads."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "scheduler": scheduler.state_dict(), "step": step}


def load(folder: Path, model: Net, optimizer: torch.optim.Optimizer, scheduler: LRScheduler) -> int:
    """Load the newest complete checkpoint; return its step, or 0 if there is none."""
    saved = sorted(folder.glob("*/.metadata"))
    if not saved:
        return 0
    state = state_of(model, optimizer, scheduler, 0)
    dcp.load(state, checkpoint_id=saved[-1].parent)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    return state["step"]


@HPWrapper()
def main() -> None:
    """Build everything and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps to train (default: 30)")
    parser.add_argument("--replicas", type=int, default=2, help="copies of the model, each sharded (default: 2)")
    parser.add_argument("--checkpoints", type=Path, help="folder of checkpoints to resume from and to save to")
    parser.add_argument("--tensorboard", help="folder for TensorBoard")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, shards = dist.get_rank(), dist.get_world_size() // options.replicas
    mesh = init_device_mesh(device, (options.replicas, shards), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(1)
    model = Net().to(device)
    for layer in [*model.layers, model]:
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = CosineAnnealingLR(optimizer, options.steps)
    done = load(options.checkpoints, model, optimizer, scheduler) if options.checkpoints else 0
    torch.manual_seed(100 + rank)  # ranks drop out different units
    training = PlainTraining(modules=[model], optimizers=[optimizer], schedulers=[scheduler])
    writer = None

    def validate_and_save(step: int) -> None:
        model.eval()
        with torch.no_grad():
            loss = model(batch_of(0, rank, device))
        model.train()
        dist.all_reduce(loss, dist.ReduceOp.SUM)
        if rank == 0:
            print(f"step {step}: loss {loss.item() / dist.get_world_size():.4f}", flush=True)
        if writer:
            writer.add_scalar("validation", loss.item() / dist.get_world_size(), step)
        if options.checkpoints:
            folder = options.checkpoints / f"{step:06d}"
            if not (folder / ".metadata").exists():  # a job that goes on may have it
                dcp.save(state_of(model, optimizer, scheduler, step), checkpoint_id=folder)

    for step in training.steps(options.steps, done=done):
        if options.tensorboard and rank == 0 and not writer:
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(options.tensorboard, purge_step=step)
        if step > 1 and (step - 1) % EVERY == 0:
            validate_and_save(step - 1)
        loss = model(batch_of(step, rank, device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if writer:
            writer.add_scalar("loss", loss.item(), step)
            writer.flush()
        training.update(loss.item())
    validate_and_save(options.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
