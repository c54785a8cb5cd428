"""Train a Megatron-core GPT in bf16, without NeMo, on the staged backend: ``DEVICE STEPS TENSOR_PARALLEL``."""

from __future__ import annotations

import os
import sys

import torch
import torch._dynamo  # else the first step imports it, and a fault meanwhile leaves it half imported
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from checkpointless import HPCallWrapper, HPWrapper, PlainTraining
from checkpointless.integrations.megatron import cleanup
from tests.gpu import staged

VOCABULARY, LENGTH = 64, 16


def model_of(device: str, tensor_parallel: int) -> GPTModel:
    """Return a small GPT on a device."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=2,
        tensor_model_parallel_size=tensor_parallel,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        use_cpu_initialization=device == "cpu",
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )
    return GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH).to(device, torch.bfloat16)


torch.use_deterministic_algorithms(True, warn_only=True)  # this imports, too: not in the block


@HPWrapper(abort_timeout=20.0)
def main(caller: HPCallWrapper) -> None:
    """Train."""
    device, steps, tensor_parallel = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    cleanup.install()
    if device == "cuda":
        torch.cuda.set_device(0)
    staged.install()
    dist.init_process_group(staged.BACKEND)
    parallel_state.initialize_model_parallel(tensor_parallel)
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    model = model_of(device, tensor_parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    replicas = parallel_state.get_data_parallel_group()
    torch.manual_seed(100 + replicas.rank())  # batches and dropout differ between the replicas
    position = torch.arange(LENGTH, device=device).expand(2, LENGTH)
    mask = torch.ones(LENGTH, LENGTH, device=device).triu(1).bool()[None, None]
    same = dist.get_process_group_ranks(replicas) if tensor_parallel > 1 else None
    training = PlainTraining(caller, [model], [optimizer], group=same)
    for step in training.steps(steps):
        caller.enter_phase("forward", step)
        tokens = torch.randint(VOCABULARY, (2, LENGTH), device=device)
        loss = model(tokens, position, mask, labels=tokens.roll(-1, 1)).mean()
        caller.enter_phase("backward", step)
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=replicas)
                parameter.grad /= replicas.size()
        training.update(loss.item())
    dist.barrier()


if __name__ == "__main__":
    main()
    print(f"rank {os.environ['RANK']} is done", flush=True)
