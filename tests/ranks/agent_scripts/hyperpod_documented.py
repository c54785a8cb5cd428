"""The script of HyperPod's documentation with its imports changed; model and data are those of ``train_gpt.py``."""

from typing import Any, Optional

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from nemo import lightning as nl
from nemo.collections import llm
from train_gpt import Bytes, ManualData, gpt_config

from checkpointless.agent import HPAgentK8sAPIFactory, wait_rank
from checkpointless.callbacks import CheckpointlessCallback
from checkpointless.inprocess import (
    CheckpointlessAbortManager,
    CheckpointlessFinalizeCleanup,
    CudaHealthCheck,
    HPCallWrapper,
    HPWrapper,
)
from checkpointless.recovery import CheckpointManager
from checkpointless.strategies import (
    CheckpointlessAutoResume,
    CheckpointlessCompatibleConnector,
    CheckpointlessMegatronStrategy,
)

wait_rank()


def main() -> None:
    @HPWrapper(
        health_check=CudaHealthCheck(),
        hp_api_factory=HPAgentK8sAPIFactory(),
        abort_timeout=60.0,
        checkpoint_manager=CheckpointManager(enable_offload=True),
        abort=CheckpointlessAbortManager.get_default_checkpointless_abort(),
        finalize=CheckpointlessFinalizeCleanup(),
    )
    def run_main(cfg: Any, caller: Optional[HPCallWrapper] = None) -> None:  # noqa: UP045 -- as it is documented
        trainer = nl.Trainer(
            accelerator="cpu",
            devices=4,
            max_steps=cfg["steps"],
            strategy=CheckpointlessMegatronStrategy(
                num_distributed_optimizer_instances=2,
                pipeline_dtype=torch.float32,
                ddp=DistributedDataParallelConfig(use_distributed_optimizer=True),
            ),
            callbacks=[CheckpointlessCallback(enable_inprocess=True, enable_checkpointless=True)],
            limit_val_batches=0,
            num_sanity_val_steps=0,
            log_every_n_steps=1,
            use_distributed_sampler=False,
            enable_progress_bar=False,
            enable_checkpointing=False,
            logger=False,
        )
        nl.NeMoLogger(log_dir="logs", name="gpt").setup(trainer)
        trainer.fresume = CheckpointlessAutoResume(resume_if_exists=True, resume_ignore_no_checkpoint=True)
        trainer._checkpoint_connector = CheckpointlessCompatibleConnector(trainer)
        trainer.wrapper = caller
        adam = OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=True, bf16=False)
        model = llm.GPTModel(gpt_config(), optim=nl.MegatronOptimizerModule(adam), tokenizer=Bytes())
        trainer.fit(model, ManualData())

    run_main({"steps": 6})


main()
