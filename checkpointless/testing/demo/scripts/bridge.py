"""Train a small GPT with Megatron-Bridge, on made-up text."""

from checkpointless.inprocess import HPWrapper
from checkpointless.integrations.megatron_bridge import pretrain
from checkpointless.system.environment import own_world_size
from checkpointless.testing.demo.scripts import options
from checkpointless.testing.demo.trainers.trainer import MICRO_BATCH, MICRO_BATCHES, SEQUENCE

# isort: split
from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
from megatron.bridge.training import config as bridge
from megatron.bridge.training.gpt_step import forward_step

OPTIONS = options.parse(__doc__)
SEED = 1234


def configuration() -> bridge.ConfigContainer:
    """Return what is trained."""
    model = GPTModelProvider(
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        seq_length=SEQUENCE,
        hidden_dropout=OPTIONS.dropout,
        attention_dropout=OPTIONS.dropout,
        tensor_model_parallel_size=OPTIONS.tensor,
        pipeline_model_parallel_size=OPTIONS.pipeline,
        transformer_layer_spec=local_layer_spec,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        cross_entropy_loss_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
    )
    data = bridge.MockGPTDatasetConfig(
        seq_length=SEQUENCE,
        random_seed=SEED,
        split="900,50,50",
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=True,
        skip_getting_attention_mask_from_dataset=False,
        dataloader_type="single",
        num_workers=OPTIONS.workers,
    )
    ranks = own_world_size() // (OPTIONS.tensor * OPTIONS.pipeline)
    return bridge.ConfigContainer(
        model=model,
        dataset=data,
        train=bridge.TrainingConfig(
            train_iters=OPTIONS.steps,
            global_batch_size=MICRO_BATCH * MICRO_BATCHES * ranks,
            micro_batch_size=MICRO_BATCH,
            eval_interval=OPTIONS.steps + 1,
            eval_iters=0,
        ),
        optimizer=bridge.OptimizerConfig(lr=1e-3, min_lr=1e-4, use_distributed_optimizer=True, weight_decay=0.01),
        ddp=bridge.DistributedDataParallelConfig(
            num_distributed_optimizer_instances=OPTIONS.holders, use_distributed_optimizer=True
        ),
        scheduler=bridge.SchedulerConfig(
            lr_decay_style="cosine", lr_warmup_iters=2, start_weight_decay=0.01, end_weight_decay=0.01
        ),
        logger=bridge.LoggerConfig(log_interval=1),
        tokenizer=bridge.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=128),
        checkpoint=bridge.CheckpointConfig(),
        rng=bridge.RNGConfig(seed=SEED),
        dist=bridge.DistributedInitConfig(distributed_backend="gloo"),
    )


@HPWrapper(checkpoint_manager=options.manager(OPTIONS))
def main() -> None:
    """Build everything and train; after a fault this is entered again."""
    pretrain(configuration(), forward_step)


if __name__ == "__main__":
    main()
