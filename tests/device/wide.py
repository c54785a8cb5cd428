"""Run a NeMo training in bf16 on the test device, each of whose ranks writes down what it holds.

The model is wide, so that its parameters take more than its activations.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from tests.device import played

if __name__ == "__main__":
    played.install()

import torch
from lightning.pytorch.callbacks import Callback
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from nemo import lightning as nl
from nemo.collections import llm
from nemo.collections.llm.gpt.model.base import local_layer_spec

from checkpointless.callbacks import CheckpointlessCallback
from checkpointless.inprocess import HPWrapper
from checkpointless.inprocess.parameter_update_lock import ParameterUpdateLock
from checkpointless.recovery import CheckpointManager
from checkpointless.strategies import CheckpointlessMegatronStrategy
from checkpointless.system.environment import own_generation, own_rank, own_run_dir
from checkpointless.testing.demo.text import ByteTokenizer, TextDataModule
from tests.ranks.users.modules import UNFUSED
from tests.ranks.warm_checks import HookedModel

SEQ_LENGTH, GLOBAL_BATCH = 16, 8
LINGERS_AFTER = 2
LATE_IN = 4
TRANSFER_BYTES = 8 * 2**20  # a buffer of the default size would be a tenth of this device


class WritesMemory(Callback):
    """Writes down the most that was held before a generation's first step, and what is held after each step."""

    def __init__(self, path: Path, lingers: bool = False) -> None:
        self._path = path
        self._lingers = lingers
        self._has_begun = False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._write("entered", trainer)
            torch.cuda.reset_peak_memory_stats()

    def on_train_batch_end(self, trainer: Any, *unused: Any) -> None:
        """Write down what is held, and the peak of the step; if asked to, wait while there are gradients."""
        self._write("stepped", trainer)
        torch.cuda.reset_peak_memory_stats()
        if self._lingers and trainer.global_step == LINGERS_AFTER and own_generation() == 0:
            wait_for_an_interruption()

    def _write(self, what: str, trainer: Any) -> None:
        optimizer = trainer.strategy.optimizers[0].mcore_optimizer
        line = {
            "what": what,
            "rank": own_rank(),
            "step": trainer.global_step,
            "generation": own_generation(),
            "held": torch.cuda.memory_allocated(),
            "most": torch.cuda.max_memory_allocated(),
            "parameters": sum(each.numel() for each in trainer.strategy.megatron_parallel.parameters()),
            "mains": sum(each.numel() for group in optimizer.param_groups for each in group["params"]),
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def wait_for_an_interruption() -> None:
    for _ in range(600):
        time.sleep(0.05)


def be_late() -> None:
    update = ParameterUpdateLock.update

    def late(lock: ParameterUpdateLock, step: int) -> Any:
        if step == LATE_IN and own_generation() == 0:
            wait_for_an_interruption()
        return update(lock, step)

    ParameterUpdateLock.update = late  # type: ignore[method-assign, assignment]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=int, help="that the device has; default: no limit")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--lingers", type=int, help=f"the rank that waits after step {LINGERS_AFTER}")
    parser.add_argument("--late", type=int, help=f"the rank whose update {LATE_IN} is late")
    parser.add_argument("--cold", action="store_true", help="survivors of a fault build their model anew")
    parser.add_argument("--hooked", action="store_true", help="a callback changes the model, which cannot be kept")
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--pipeline-parallel", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    options = parse()
    played.memory.limit = options.bytes
    if own_rank() == options.late:
        be_late()
    train(options)


@HPWrapper(checkpoint_manager=CheckpointManager(memory_budget_bytes=TRANSFER_BYTES))
def train(options: argparse.Namespace) -> None:
    config = llm.GPTConfig(
        num_layers=4,
        hidden_size=256,
        ffn_hidden_size=1024,
        num_attention_heads=4,
        seq_length=SEQ_LENGTH,
        make_vocab_size_divisible_by=256,
        transformer_layer_spec=local_layer_spec,
        **UNFUSED,
    )
    optimizer = OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=True, bf16=True)
    directory = own_run_dir()
    assert directory is not None
    memory = WritesMemory(directory / f"memory-{own_rank()}.jsonl", lingers=own_rank() == options.lingers)
    trainer = nl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_steps=options.steps,
        plugins=nl.MegatronMixedPrecision(precision="bf16-mixed"),
        strategy=CheckpointlessMegatronStrategy(
            num_distributed_optimizer_instances=options.instances,
            tensor_model_parallel_size=options.tensor_parallel,
            pipeline_model_parallel_size=options.pipeline_parallel,
            pipeline_dtype=torch.bfloat16,
            warm=not options.cold,
            ddp=DistributedDataParallelConfig(
                use_distributed_optimizer=True,
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=options.pipeline_parallel == 1,
                overlap_param_gather=options.pipeline_parallel == 1,
            ),
        ),
        callbacks=[CheckpointlessCallback(), memory, *([HookedModel()] if options.hooked else [])],
        logger=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    data = TextDataModule(seq_length=SEQ_LENGTH, micro_batch_size=1, global_batch_size=GLOBAL_BATCH)
    model = llm.GPTModel(config, optim=nl.MegatronOptimizerModule(optimizer), tokenizer=ByteTokenizer())
    trainer.fit(model, data)


if __name__ == "__main__":
    main()
