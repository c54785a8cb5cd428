"""Provide overrides of the tiny recipe that several tests share."""

from pathlib import Path

TP2 = ("strategy.tensor_model_parallel_size=2", "data.micro_batch_size=4", "model.config.num_layers=2")
PP2 = ("strategy.pipeline_model_parallel_size=2",)
EP2 = (
    # Megatron-core 0.15 leaves the router's bias uninitialised memory; without biases there is none.
    "model.config.add_bias_linear=false",
    "model.config.num_moe_experts=4",
    "model.config.moe_grouped_gemm=false",
    "model.config.moe_router_topk=2",
    "strategy.expert_model_parallel_size=2",
    "model.config.num_layers=2",
)
DROPOUT = ("model.config.hidden_dropout=0.1", "model.config.attention_dropout=0.1")
RESUME = "resume={_target_: nemo.lightning.AutoResume, resume_if_exists: true, resume_ignore_no_checkpoint: true}"


def with_checkpoints(
    directory: Path, every: int = 3, more: str = "save_top_k: -1", log: str = ""
) -> tuple[str, ...]:
    """Return overrides for NeMo's own checkpoint every so many steps, below a directory."""
    return (
        "trainer.enable_checkpointing=true",
        "callbacks.checkpoint={_target_: nemo.lightning.pytorch.callbacks.ModelCheckpoint, save_last: true, "
        f"every_n_train_steps: {every}, monitor: null, save_context_on_train_end: false, {more}}}",
        f"log={{_target_: nemo.lightning.NeMoLogger, log_dir: '{directory}', name: tiny_gpt{log}}}",
    )
