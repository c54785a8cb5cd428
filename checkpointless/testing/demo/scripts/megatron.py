"""Train a small GPT with Megatron-core's model, DDP and distributed optimizer in a loop of one's own."""

from collections.abc import Callable, Iterator
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
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from checkpointless.inprocess import HPCallWrapper, HPWrapper
from checkpointless.integrations.megatron.training import MegatronTraining
from checkpointless.testing.demo.scripts import byte_model, options
from checkpointless.testing.demo.trainers.trainer import MICRO_BATCH, MICRO_BATCHES, SEQUENCE

OPTIONS = options.parse(__doc__)


def build() -> tuple[Any, Any]:
    """Return the wrapped model and its optimizer."""
    config = TransformerConfig(
        num_layers=byte_model.LAYERS,
        hidden_size=byte_model.WIDTH,
        num_attention_heads=byte_model.HEADS,
        hidden_dropout=OPTIONS.dropout,
        attention_dropout=OPTIONS.dropout,
        tensor_model_parallel_size=OPTIONS.tensor,
        pipeline_model_parallel_size=OPTIONS.pipeline,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )
    ends = {
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
    }
    gpt: Any = GPTModel(config, get_gpt_layer_local_spec(), byte_model.BYTES, SEQUENCE, **ends)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True, num_distributed_optimizer_instances=OPTIONS.holders
    )
    model = DistributedDataParallel(config, ddp, gpt)
    config.finalize_model_grads_func = finalize_model_grads
    asked = OptimizerConfig(lr=1e-2, weight_decay=0.01, clip_grad=1.0, use_distributed_optimizer=True)
    return model, get_megatron_optimizer(asked, [model])


LossFunction = Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, float]]]


def forward_step(
    call: HPCallWrapper, step: int, batches: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module
) -> tuple[torch.Tensor, LossFunction]:
    """Compute the outputs of a microbatch, and return them with the function of their loss."""
    call.enter_phase("data", step)
    batch = next(batches)
    call.enter_phase("forward", step)
    position = torch.arange(SEQUENCE).expand(MICRO_BATCH, SEQUENCE)
    mask = torch.ones(SEQUENCE, SEQUENCE).triu(1).bool()[None, None]
    output: torch.Tensor = model(batch["tokens"], position, mask, labels=batch["labels"])
    output.register_hook(lambda _: call.enter_phase("backward", step))

    def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        loss = output.float().mean()
        return loss, {"loss": float(loss.detach())}

    return output, loss_of


@HPWrapper(checkpoint_manager=options.manager(OPTIONS))
def main(caller: HPCallWrapper) -> None:
    """Build everything and train; after a fault this is entered again."""
    MegatronTraining.prepare()
    dist.init_process_group("gloo")
    caller.enter_phase("init", caller.high_water)
    parallel_state.initialize_model_parallel(
        OPTIONS.tensor, OPTIONS.pipeline, num_distributed_optimizer_instances=OPTIONS.holders
    )
    torch.manual_seed(byte_model.SEED)
    model_parallel_cuda_manual_seed(byte_model.SEED)
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    samples = MICRO_BATCH * MICRO_BATCHES * ranks
    init_num_microbatches_calculator(dist.get_rank(), None, samples, MICRO_BATCH, ranks)
    model, optimizer = build()
    training = MegatronTraining(caller, [model], optimizer)
    forward_backward = get_forward_backward_func()
    batches = None
    for step in training.steps(OPTIONS.steps):
        if batches is None:
            batches = byte_model.batches(caller, OPTIONS.steps, step, rank, ranks, OPTIONS.workers)
        losses = forward_backward(
            forward_step_func=partial(forward_step, caller, step),
            data_iterator=batches,
            model=[model],
            num_microbatches=MICRO_BATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        training.update(sum(each["loss"] for each in losses) / MICRO_BATCHES)
    dist.barrier()


if __name__ == "__main__":
    main()
