"""Trains a small GPT with Megatron-Bridge, through faults: an ordinary script with three lines changed.

    checkpointless run --cpu --nproc-per-node 4 examples/train_bridge.py --steps 20

The lines are marked; without them this is plain Bridge. With `--cpu` it trains on this machine's CPUs.
"""

import argparse

from checkpointless import HPWrapper  # in place of nothing
from checkpointless.bridge import pretrain  # in place of: from megatron.bridge.training.pretrain import pretrain

# isort: split
import torch
from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
from megatron.bridge.training import config as bridge
from megatron.bridge.training.gpt_step import forward_step

SEQ_LENGTH = 32


def configuration(steps: int, tp: int) -> bridge.ConfigContainer:
    on_gpu = torch.cuda.is_available()
    model = GPTModelProvider(
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        seq_length=SEQ_LENGTH,
        tensor_model_parallel_size=tp,
        transformer_layer_spec=local_layer_spec,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        cross_entropy_loss_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
    )
    data = bridge.MockGPTDatasetConfig(
        seq_length=SEQ_LENGTH,
        random_seed=1234,
        split="900,50,50",
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=True,
        skip_getting_attention_mask_from_dataset=False,
        dataloader_type="single",
        num_workers=0,
    )
    return bridge.ConfigContainer(
        model=model,
        dataset=data,
        train=bridge.TrainingConfig(
            train_iters=steps, global_batch_size=8, micro_batch_size=1, eval_interval=5, eval_iters=1
        ),
        optimizer=bridge.OptimizerConfig(lr=1e-3, min_lr=1e-4, use_distributed_optimizer=True, weight_decay=0.01),
        ddp=bridge.DistributedDataParallelConfig(
            num_distributed_optimizer_instances=2, use_distributed_optimizer=True
        ),
        scheduler=bridge.SchedulerConfig(
            lr_decay_style="cosine", lr_warmup_iters=2, start_weight_decay=0.01, end_weight_decay=0.01
        ),
        logger=bridge.LoggerConfig(log_interval=1),
        tokenizer=bridge.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=128),
        checkpoint=bridge.CheckpointConfig(),
        rng=bridge.RNGConfig(seed=1234),
        dist=bridge.DistributedInitConfig(distributed_backend="nccl" if on_gpu else "gloo"),
    )


@HPWrapper()  # in place of nothing
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tp", type=int, default=1)
    options = parser.parse_args()
    pretrain(configuration(options.steps, options.tp), forward_step)


if __name__ == "__main__":
    main()
