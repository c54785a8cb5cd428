"""Train a small GPT with torch's FSDP2 and replicas (HSDP) in a loop of one's own, also with tensor parallelism."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

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
    shape = (OPTIONS.holders, -1, OPTIONS.tensor)
    world = torch.arange(dist.get_world_size()).view(shape)
    mesh = init_device_mesh("cpu", tuple(world.shape), mesh_dim_names=("replicate", "shard", "tensor"))
    rank, ranks = dist.get_rank() // OPTIONS.tensor, dist.get_world_size() // OPTIONS.tensor
    torch.manual_seed(byte_model.SEED)
    model = byte_model.ByteModel(OPTIONS.dropout)
    for block in model.blocks:
        if OPTIONS.tensor > 1:
            parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["replicate", "shard"])
    fully_shard(model, mesh=mesh["replicate", "shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, OPTIONS.steps)
    torch.manual_seed(byte_model.SEED + rank)  # a tensor-parallel group has the same batches and the same dropout
    training = PlainTraining(caller, [model], [optimizer], schedulers=[scheduler])
    batches = None
    for step in training.steps(OPTIONS.steps):
        if batches is None:
            batches = byte_model.batches(caller, OPTIONS.steps, step, rank, ranks, OPTIONS.workers)
        total = 0.0
        for _ in range(MICRO_BATCHES):
            caller.enter_phase("data", step)
            batch = next(batches)
            caller.enter_phase("forward", step)
            loss = model(batch["tokens"], batch["labels"]) / MICRO_BATCHES
            caller.enter_phase("backward", step)
            loss.backward()
            total += loss.item()
        if OPTIONS.tensor == 1:  # torch does not clip parameters of different meshes together
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        training.update(total)
    dist.barrier()


if __name__ == "__main__":
    main()
