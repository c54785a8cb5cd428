"""Train a GPT with Megatron-core alone: ``checkpointless run --cpu --nproc-per-node 4 examples/train_megatron.py``.

``train_megatron.diff`` has the lines that make it come through faults.
"""

import argparse
from collections.abc import Iterator

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

from checkpointless.megatron.training import MegatronTraining

VOCABULARY, LENGTH, MICRO, ACCUMULATE = 64, 16, 2, 2
SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "masked_softmax_fusion": False}
STEP = {"num_microbatches": ACCUMULATE, "seq_length": LENGTH, "micro_batch_size": MICRO, "forward_only": False}
REPLICAS = {"num_distributed_optimizer_instances": 2}  # so that each shard of the optimizer is held twice


def build_model() -> DistributedDataParallel:
    """Return a small GPT."""
    config = TransformerConfig(**SIZES, finalize_model_grads_func=finalize_model_grads)
    model = GPTModel(config, gpt_layer_specs.get_gpt_layer_local_spec(), VOCABULARY, LENGTH)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, **REPLICAS)
    return DistributedDataParallel(config, ddp, model.to(torch.cuda.current_device()))


def forward_step(batches: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple[torch.Tensor, object]:
    """Return the model's losses of a batch, and what makes one loss of them."""
    batch = next(batches).to(torch.cuda.current_device())
    losses = model(batch, torch.arange(LENGTH, device=batch.device), None, labels=batch.roll(-1, 1))
    return losses, lambda losses: (losses.mean(), losses.mean().item() / ACCUMULATE)


@MegatronTraining.wrapper()
def main() -> None:
    """Build everything and train; after a fault this is entered again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps to train (default: 20)")
    options = parser.parse_args()
    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    parallel_state.initialize_model_parallel(**REPLICAS)
    torch.manual_seed(1)  # position embeddings are drawn on the CPU
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    model, schedule = build_model(), get_forward_backward_func()
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, use_distributed_optimizer=True), [model])
    training = MegatronTraining(chunks=[model], optimizer=optimizer)
    for step in training.steps(options.steps):
        seeded = torch.Generator().manual_seed(1000 * step + torch.distributed.get_rank())
        data = iter(torch.randint(VOCABULARY, (ACCUMULATE, MICRO, LENGTH), generator=seeded))
        losses = schedule(forward_step_func=forward_step, data_iterator=data, model=[model], **STEP)
        training.update(sum(losses))
        print(f"step {step}: loss {sum(losses):.6f}", flush=True)
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
