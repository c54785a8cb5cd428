"""Train with Hugging Face Accelerate: ``checkpointless run --cpu --nproc-per-node 4 examples/train_accelerate.py``.

``train_accelerate.diff`` has the lines that make it come through faults.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from checkpointless import HPWrapper, PlainTraining

WIDTH, BATCH, ACCUMULATE = 64, 8, 2


def build_model() -> torch.nn.Module:
    """Return a model that predicts the next number of each row."""
    hidden, last = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)
    return torch.nn.Sequential(hidden, torch.nn.GELU(), torch.nn.Dropout(0.1), last)


def batches(rows: torch.Tensor, step: int, accelerator: Accelerator) -> list[torch.Tensor]:
    """Return this rank's batches of a step, which follow from the step's number."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(step))
    mine = order[accelerator.process_index :: accelerator.num_processes]
    return [rows[mine[at * BATCH : (at + 1) * BATCH]] for at in range(ACCUMULATE)]


@HPWrapper()
def main() -> None:
    """Build everything and train; after a fault this is entered again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps to train (default: 20)")
    options = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=ACCUMULATE)
    set_seed(1)
    rows = torch.randn(512, WIDTH).to(accelerator.device)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4 * options.steps)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    set_seed(100, device_specific=True)  # ranks drop out different units
    training = PlainTraining(modules=[model], optimizers=[optimizer], schedulers=[scheduler])
    for step in training.steps(options.steps):
        total = 0.0
        for batch in batches(rows, step, accelerator):
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(batch), batch.roll(-1, 1))
                accelerator.backward(loss)
                total += loss.item() / ACCUMULATE
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        training.update(total)
        accelerator.print(f"step {step}: loss {total:.6f}", flush=True)
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
