"""Train with a loop of one's own and FSDP2: ``checkpointless run --cpu --nproc-per-node 4 examples/train_hsdp.py``.

The mesh is one for HSDP: two replicas, each divided among half of the ranks. ``train_hsdp.diff`` has the lines that
make it come through faults.
"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from checkpointless import HPWrapper, PlainTraining

WIDTH, BATCH, ACCUMULATE = 64, 8, 2


def build_model() -> torch.nn.Sequential:
    """Return a model that predicts the next number of each row."""
    hidden, last = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)
    return torch.nn.Sequential(hidden, torch.nn.GELU(), torch.nn.Dropout(0.1), last)


def batches(rows: torch.Tensor, step: int) -> list[torch.Tensor]:
    """Return this rank's batches of a step, which follow from the step's number."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(step))
    mine = order[dist.get_rank() :: dist.get_world_size()]
    return [rows[mine[at * BATCH : (at + 1) * BATCH]] for at in range(ACCUMULATE)]


@HPWrapper()
def main() -> None:
    """Build everything and train; after a fault this is entered again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps to train (default: 20)")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(1)
    rows = torch.randn(512, WIDTH).to(device)
    model = build_model().to(device)
    for layer in (model[0], model[3], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(100 + dist.get_rank())  # ranks drop out different units
    training = PlainTraining(modules=[model], optimizers=[optimizer])
    for step in training.steps(options.steps):
        total = 0.0
        for batch in batches(rows, step):
            loss = torch.nn.functional.mse_loss(model(batch), batch.roll(-1, 1)) / ACCUMULATE
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        training.update(total)
        print(f"step {step}: loss {total:.6f}", flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
