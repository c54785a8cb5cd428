"""Train with a loop of one's own and DDP: ``checkpointless run --cpu --nproc-per-node 4 examples/train_ddp.py``.

``train_ddp.diff`` has the lines that make it come through faults.
"""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from checkpointless import HPWrapper, PlainTraining

WIDTH, BATCH, ACCUMULATE = 64, 8, 2


def build_model() -> torch.nn.Module:
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
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(1)
    rows = torch.randn(512, WIDTH)
    model = DistributedDataParallel(build_model().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(100 + dist.get_rank())  # ranks drop out different units
    training = PlainTraining(modules=[model], optimizers=[optimizer])
    for step in training.steps(options.steps):
        total = 0.0
        for number, batch in enumerate(batches(rows, step), start=1):
            batch = batch.to(device)
            with nullcontext() if number == ACCUMULATE else model.no_sync():
                loss = torch.nn.functional.mse_loss(model(batch), batch.roll(-1, 1)) / ACCUMULATE
                loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        training.update(total)
        print(f"step {step}: loss {total:.6f}", flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
