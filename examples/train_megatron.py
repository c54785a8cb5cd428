"""Train a GPT with Megatron-core alone: ``checkpointless run --cpu --nproc-per-node 4 examples/train_megatron.py``.

``train_megatron.diff`` has the lines that make it come through faults.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from checkpointless.megatron.training import MegatronTraining

VOCABULARY, LENGTH, MICRO, ACCUMULATE = 64, 16, 2, 2
REPLICAS = 2  # of the optimizer, so that each of its shards is held twice
SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2}
NO_FUSION = {"bias_dropout_fusion": False, "masked_softmax_fusion": False, "apply_rope_fusion": False}


def build_model() -> DistributedDataParallel:
    """Return a small GPT."""
    config = TransformerConfig(**SIZES, **NO_FUSION, use_cpu_initialization=True, pipeline_dtype=torch.float32)
    config.finalize_model_grads_func = finalize_model_grads
    model = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH).to(torch.cuda.current_device())
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True, num_distributed_optimizer_instances=REPLICAS
    )
    return DistributedDataParallel(config, ddp, model)


def batches(step: int) -> Iterator[torch.Tensor]:
    """Yield this rank's batches of a step, which follow from the step's number."""
    generator = torch.Generator().manual_seed(1000 * step + parallel_state.get_data_parallel_rank())
    for _ in range(ACCUMULATE):
        yield torch.randint(VOCABULARY, (MICRO, LENGTH), generator=generator).to(torch.cuda.current_device())


def forward_step(tokens: Iterator[torch.Tensor], model: torch.nn.Module) -> Any:
    """Return the model's losses of a batch, and what makes one loss of them."""
    batch = next(tokens)
    position = torch.arange(LENGTH, device=batch.device).expand(MICRO, LENGTH)
    mask = torch.ones(LENGTH, LENGTH, device=batch.device).triu(1).bool()[None, None]
    losses = model(batch, position, mask, labels=batch.roll(-1, 1))
    return losses, lambda losses: (losses.mean(), losses.mean().item() / ACCUMULATE)


@MegatronTraining.wrapper()
def main() -> None:
    """Build everything and train; after a fault this is entered again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps to train (default: 20)")
    options = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=REPLICAS)
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    model = build_model()
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, use_distributed_optimizer=True), [model])
    training = MegatronTraining(chunks=[model], optimizer=optimizer)
    for step in training.steps(options.steps):
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches(step),
            model=[model],
            num_microbatches=ACCUMULATE,
            seq_length=LENGTH,
            micro_batch_size=MICRO,
            forward_only=False,
        )
        training.update(sum(losses))
        print(f"step {step}: loss {sum(losses):.6f}", flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
