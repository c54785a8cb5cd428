"""Provide overrides of the tiny recipe that several tests share."""

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
