"""Train the model of ``examples/train_gpt.py`` in bf16: two tensor-parallel ranks, two of each shard; ``STEPS``.

Each rank may be a node of its own, so that four of them share one GPU.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from nemo import lightning as nl
from nemo.collections import llm

from checkpointless.callbacks import CheckpointlessCallback
from checkpointless.inprocess import HPWrapper
from checkpointless.strategies import CheckpointlessMegatronStrategy

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
sys.path.insert(0, str(EXAMPLE.parent))
train_gpt = importlib.import_module(EXAMPLE.stem)


@HPWrapper(abort_timeout=20.0)
def main() -> None:
    """Build everything and train; after a fault this is entered again."""
    config = train_gpt.gpt_config()
    config.pipeline_dtype = torch.bfloat16
    optimizer = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        clip_grad=1.0,
        use_distributed_optimizer=True,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = nl.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=devices,
        num_nodes=int(os.environ["WORLD_SIZE"]) // devices,
        max_steps=int(sys.argv[1]),
        strategy=CheckpointlessMegatronStrategy(
            tensor_model_parallel_size=2,
            pipeline_dtype=torch.bfloat16,
            ddp=DistributedDataParallelConfig(
                use_distributed_optimizer=True, num_distributed_optimizer_instances=2
            ),
        ),
        plugins=[nl.MegatronMixedPrecision(precision="bf16-mixed")],
        callbacks=[CheckpointlessCallback()],
        limit_val_batches=0,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        logger=False,
    )
    model = llm.GPTModel(config, optim=nl.MegatronOptimizerModule(optimizer), tokenizer=train_gpt.Bytes())
    trainer.fit(model, train_gpt.ManualData())


if __name__ == "__main__":
    main()
