"""Train a small GPT with torch's ``DistributedDataParallel`` in a loop of one's own."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from checkpointless.inprocess import HPCallWrapper, HPWrapper
from checkpointless.integrations.torch import PlainTraining
from checkpointless.testing.demo.scripts import byte_model, options
from checkpointless.testing.demo.trainers.trainer import MICRO_BATCHES

OPTIONS = options.parse(__doc__)


@HPWrapper(checkpoint_manager=options.manager(OPTIONS))
def main(caller: HPCallWrapper) -> None:
    """Build everything and train; after a fault this is entered again."""
    dist.init_process_group("gloo")
    caller.enter_phase("init", caller.high_water)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(byte_model.SEED)
    model = DistributedDataParallel(byte_model.ByteModel(OPTIONS.dropout))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, OPTIONS.steps)
    torch.manual_seed(byte_model.SEED + rank)
    training = PlainTraining(caller, [model], [optimizer], schedulers=[scheduler])
    batches = None
    for step in training.steps(OPTIONS.steps):
        if batches is None:
            batches = byte_model.batches(caller, OPTIONS.steps, step, rank, ranks, OPTIONS.workers)
        total = 0.0
        for micro in range(MICRO_BATCHES):
            caller.enter_phase("data", step)
            batch = next(batches)
            caller.enter_phase("forward", step)
            with nullcontext() if micro == MICRO_BATCHES - 1 else model.no_sync():
                loss = model(batch["tokens"], batch["labels"]) / MICRO_BATCHES
                caller.enter_phase("backward", step)
                loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        training.update(total)
    dist.barrier()


if __name__ == "__main__":
    main()
