"""Train the tiny recipe with NVRx's local-checkpoint callback and a manager of ours, and tell what came of it."""

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from checkpointless.recipes import runner
from checkpointless.replication.local_checkpoint import LazyCliqueReplicationStrategy, LocalCheckpointManager


def train(
    root: str, overrides: list[str], every: int = 0, in_background: bool = False, resume: bool = False
) -> Any:
    """Train with a copy of each rank's part on the other rank, each of which stands for a node.

    Local checkpoints come ``every`` so many steps; ``resume`` begins with the newest one, where NeMo would begin
    with the first step's on the disk.
    """
    from megatron.core import parallel_state
    from nemo.lightning.pytorch.local_ckpt import MCoreHierarchicalCheckpointIO
    from nemo.utils.callbacks.dist_ckpt_io import AsyncFinalizableCheckpointIO
    from nvidia_resiliency_ext.ptl_resiliency.local_checkpoint_callback import LocalCheckpointCallback

    background = f"strategy.ckpt_async_save={str(in_background).lower()}"
    config = runner.load("tiny_gpt_cpu", ["checkpointless.enabled=false", background, *overrides])
    runner.prepare_process()
    job = runner.build(config)
    job.optim.connect(job.model)
    recorder = Recorder()
    node = Path(root) / f"node{os.environ['RANK']}"
    manager = LocalCheckpointManager(node, "a-job", LazyCliqueReplicationStrategy(replication_jump=1))
    strategy: Any = job.trainer.strategy
    inner = strategy.checkpoint_io.checkpoint_io if in_background else strategy.checkpoint_io
    io: Any = MCoreHierarchicalCheckpointIO(inner, manager, lambda path: 1, async_save=in_background)
    strategy.checkpoint_io = AsyncFinalizableCheckpointIO(io) if in_background else io
    job.trainer.callbacks.append(recorder)
    older = Path(root) / "older"
    if every:
        job.trainer.callbacks.append(LocalCheckpointCallback(every_n_train_steps=every))
        job.trainer.callbacks.append(_Once(older))
    job.trainer.fit(job.model, job.data, ckpt_path=str(older) if resume else None)
    result = {
        "losses": recorder.losses,
        "samples": recorder.samples,
        "found": manager.find_latest(),
        "files": len(list(node.rglob("*.ckpt"))),
    }
    torch.distributed.destroy_process_group()
    parallel_state.destroy_model_parallel()
    return result


class Recorder(Callback):
    """Notes the loss of every step, and the samples that were read."""

    def __init__(self) -> None:
        self.losses: list[str] = []
        self.samples: list[int] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        dataset = trainer.train_dataloader.dataset
        base: Any = type(dataset)

        class Recorded(base):
            def __getitem__(inner, index: int) -> dict[str, torch.Tensor]:
                self.samples.append(index)
                return base.__getitem__(inner, index)

        dataset.__class__ = Recorded

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["reduced_train_loss"]).hex())


class _Once(Callback):
    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 1:
            trainer.save_checkpoint(self._path)
