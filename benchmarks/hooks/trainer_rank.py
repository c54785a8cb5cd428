"""One rank of a case: `trainer_rank.py CASE DIRECTORY STEPS`. The models are those of `examples/`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.hooks.trainer_timer import TrainerTimer
from checkpointless import HPCallWrapper, HPWrapper, PlainTraining

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

RANKS = 4


def plain(call: HPCallWrapper, directory: str, steps: int, hsdp: bool) -> None:
    """Train with DDP, or with FSDP2 on a mesh with replicas."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from train_ddp import WIDTH, build_model

    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model: Any = build_model()
    if hsdp:
        mesh = dist.init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("replicate", "shard"))
        for layer in (model[0], model[3], model):
            fully_shard(layer, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    training = PlainTraining(call, [model], [torch.optim.AdamW(model.parameters(), lr=1e-3)])
    timer = TrainerTimer(call, directory)
    timer.time_loop(training)
    for _ in timer.steps(training, steps):
        batch = torch.randn(8, WIDTH)
        loss = torch.nn.functional.mse_loss(model(batch), batch.roll(-1, 1))
        loss.backward()
        training.update(loss.item())
    timer.write()


def lightning(call: HPCallWrapper, directory: str, steps: int, hsdp: bool, kept: str = "") -> None:
    """Train with Lightning, DDP or HSDP; the module keeps as much in plain attributes as ``kept`` says."""
    import lightning.pytorch as pl
    import train_lightning
    import train_lightning_hsdp
    from torch.utils.data import DataLoader, TensorDataset

    from checkpointless.strategies import CheckpointlessDDPStrategy, CheckpointlessModelParallelStrategy

    class Timing(pl.Callback):
        timer: TrainerTimer

        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.timer = TrainerTimer(call, directory)
            self.timer.time_lightning(trainer)

        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if kept and not kept.endswith("still"):
                pl_module.kept[batch_idx % len(pl_module.kept)] += 1.0
            self.timer.lap()

        def on_train_end(self, *args: Any) -> None:
            self.timer.write()

    sharded: Any = CheckpointlessModelParallelStrategy
    rows = torch.randn(RANKS * 8 * steps, train_lightning.WIDTH)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=sharded(RANKS, tensor_parallel_size=1, replicas=2) if hsdp else CheckpointlessDDPStrategy(),
        max_steps=steps,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        callbacks=[Timing()],
    )
    model: Any = (train_lightning_hsdp if hsdp else train_lightning).Model()
    if kept:
        model.kept = [0.0] * 110 if kept == "1kb" else torch.zeros(250_000)
    trainer.fit(model, DataLoader(TensorDataset(rows), batch_size=8))


def megatron(call: HPCallWrapper, directory: str, steps: int) -> None:
    """Train with Megatron-core's model, DDP, schedule and distributed optimizer."""
    import train_megatron as example
    from megatron.core import parallel_state
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from checkpointless.integrations.megatron.training import MegatronTraining

    MegatronTraining.prepare()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(**example.REPLICAS)
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    model = example.build_model()
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, use_distributed_optimizer=True), [model])
    training = MegatronTraining(call, [model], optimizer)
    timer = TrainerTimer(call, directory)
    timer.time_megatron(training, optimizer)
    for step in timer.steps(training, steps):
        shape = (example.ACCUMULATE, example.MICRO, example.LENGTH)
        data = iter(torch.randint(example.VOCABULARY, shape, generator=torch.Generator().manual_seed(step)))
        losses = get_forward_backward_func()(
            forward_step_func=example.forward_step, data_iterator=data, model=[model], **example.STEP
        )
        training.update(sum(losses))
    timer.write()


@HPWrapper()
def main(caller: HPCallWrapper) -> None:
    """Train, timed."""
    case, directory, steps = sys.argv[1:]
    framework, _, kind = case.partition("-")
    torch.set_num_threads(1)
    if framework == "megatron":
        megatron(caller, directory, int(steps))
    elif framework == "plain":
        plain(caller, directory, int(steps), kind == "hsdp")
    else:
        lightning(caller, directory, int(steps), kind == "hsdp", kind if kind.startswith("1") else "")
    dist.barrier()


if __name__ == "__main__":
    main()
