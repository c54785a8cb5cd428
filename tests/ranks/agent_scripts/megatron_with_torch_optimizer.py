"""Train a Megatron-core model with an optimizer of torch's."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from checkpointless import HPCallWrapper, HPWrapper, PlainTraining
from checkpointless.integrations.megatron import cleanup

VOCABULARY, LENGTH = 64, 16


def build_model() -> GPTModel:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )
    return GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH)


@HPWrapper()
def main(caller: HPCallWrapper) -> None:
    cleanup.install()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + dist.get_rank())

    position = torch.arange(LENGTH).expand(2, LENGTH)
    mask = torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None]
    training = PlainTraining(caller, [model], [optimizer])
    for _ in training.steps(6):
        tokens = torch.randint(VOCABULARY, (2, LENGTH))
        loss = model(tokens, position, mask, labels=tokens.roll(-1, 1)).mean()
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        training.update(loss.item())
    dist.barrier()


main()
