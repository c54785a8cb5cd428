"""Train a GPT in a loop of one's own with Megatron's DDP and optimizer: ``STEPS KEY=VALUE...``.

``tp``, ``pp``, ``ep``, ``instances``, ``bf16``, ``distributed``, ``fp16``: each a number; ``overlap=1`` overlaps
reduction and gather; ``adds`` is the step in which an optimizer is given one parameter more, ``stills`` the one in
which the loop calls ``eval()`` once and for all; with ``check=N`` gradients are checked in every N-th step.
"""

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from checkpointless import HPCallWrapper, HPWrapper
from checkpointless.integrations.megatron.training import MegatronTraining
from checkpointless.recovery import CheckpointManager, NeighborMemory

STEPS, VOCABULARY, LENGTH, MICRO = int(sys.argv[1]), 64, 16, 2
ASKED = {key: int(value) for key, value in (each.split("=") for each in sys.argv[2:])}
TP, PP, EP, INSTANCES = ASKED.get("tp", 1), ASKED.get("pp", 1), ASKED.get("ep", 1), ASKED.get("instances", 2)
BF16, FP16, DISTRIBUTED = ASKED.get("bf16", 0), ASKED.get("fp16", 0), bool(ASKED.get("distributed", 1))
TIERS = [NeighborMemory(overlap=False, jump=ASKED.get("jump", 0))] if DISTRIBUTED and INSTANCES == 1 else []


def build() -> tuple[list[Any], Any, Any]:
    precision = {"bf16": bool(BF16), "fp16": bool(FP16)}
    experts = {"num_moe_experts": 4, "expert_model_parallel_size": EP, "add_bias_linear": False}
    dtype = torch.bfloat16 if BF16 else torch.float16 if FP16 else torch.float32
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        tensor_model_parallel_size=TP,
        pipeline_model_parallel_size=PP,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        **precision,
        **(experts if EP > 1 else {}),
    )
    model: Any = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=4 if EP > 1 else None),
        VOCABULARY,
        LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    if BF16 or FP16:
        model = Float16Module(config, model)
    return with_optimizer(config, model.to(torch.cuda.current_device()))


def with_optimizer(config: TransformerConfig, model: Any) -> tuple[list[Any], Any, Any]:
    precision, overlap = {"bf16": bool(BF16), "fp16": bool(FP16)}, bool(ASKED.get("overlap", 0))
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=DISTRIBUTED,
        num_distributed_optimizer_instances=INSTANCES if DISTRIBUTED else 1,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap and DISTRIBUTED,
    )
    model = DistributedDataParallel(config, ddp, model)
    config.finalize_model_grads_func = finalize_model_grads
    asked = OptimizerConfig(
        lr=1e-2,
        min_lr=1e-3,
        weight_decay=0.01,
        clip_grad=1.0,
        use_distributed_optimizer=DISTRIBUTED,
        overlap_param_gather=overlap and DISTRIBUTED,
        initial_loss_scale=2.0**24,
        hysteresis=1,
        **precision,
    )
    optimizer = get_megatron_optimizer(asked, [model])
    config.grad_scale_func = optimizer.scale_loss
    if overlap:
        config.no_sync_func, config.grad_sync_func = model.no_sync, model.start_grad_sync
        if DISTRIBUTED:
            config.param_sync_func = model.start_param_sync
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-2,
        min_lr=1e-3,
        lr_warmup_steps=8,
        lr_decay_steps=64,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=64,
        wd_incr_style="constant",
    )
    return [model], optimizer, scheduler


def forward_step(call: HPCallWrapper, step: int, batches: Iterator[torch.Tensor], model: Any) -> Any:
    call.enter_phase("forward", step)
    tokens = next(batches).to(torch.cuda.current_device())
    position = torch.arange(LENGTH, device=tokens.device).expand(MICRO, LENGTH)
    mask = torch.ones(LENGTH, LENGTH, device=tokens.device).triu(1).bool()[None, None]
    output = model(tokens, position, mask, labels=tokens.roll(-1, 1))

    def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        loss = output.float().mean()
        call.enter_phase("backward", step)
        return loss, {"loss": float(loss.detach())}

    return output, loss_of


@HPWrapper(checkpoint_manager=CheckpointManager(tiers=TIERS))
def main(caller: HPCallWrapper) -> None:
    MegatronTraining.prepare()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    parallel_state.initialize_model_parallel(
        TP, PP, expert_model_parallel_size=EP, num_distributed_optimizer_instances=INSTANCES if DISTRIBUTED else 1
    )
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    data_parallel, data_rank = (
        parallel_state.get_data_parallel_world_size(),
        parallel_state.get_data_parallel_rank(),
    )
    init_num_microbatches_calculator(dist.get_rank(), None, 2 * MICRO * data_parallel, MICRO, data_parallel)
    chunks, optimizer, scheduler = build()
    every = ASKED.get("check")
    training = MegatronTraining(caller, chunks, optimizer, schedulers=[scheduler], sdc_check_every=every)
    forward_backward = get_forward_backward_func()
    for step in training.steps(STEPS):
        if ASKED.get("adds") == step:
            inner = getattr(optimizer, "chained_optimizers", [optimizer])[0].optimizer
            inner.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
        if ASKED.get("stills") == step:
            chunks[0].eval()
        caller.enter_phase("data", step)
        generator = torch.Generator().manual_seed(1000 * step + data_rank)
        batches = [torch.randint(VOCABULARY, (MICRO, LENGTH), generator=generator) for _ in range(2)]

        def compute(step: int = step, batches: list[torch.Tensor] = batches) -> Any:
            return forward_backward(
                forward_step_func=partial(forward_step, caller, step),
                data_iterator=iter(batches),
                model=chunks,
                num_microbatches=2,
                seq_length=LENGTH,
                micro_batch_size=MICRO,
                forward_only=False,
            )

        losses = training.checked(compute)
        training.update(sum(each["loss"] for each in losses), increment=4)
    dist.barrier()


main()
