"""Train a Megatron-core GPT in a loop of one's own with ``torch.optim.AdamW``.

``STEPS [TENSOR_PARALLEL [OVERLAP]]``: with the last, neighbors keep copies, which are made beside the next step
(``true``) or before it (``false``).
"""

import sys

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from checkpointless import HPCallWrapper, HPWrapper, PlainTraining
from checkpointless.integrations.megatron import cleanup
from checkpointless.recovery import CheckpointManager, NeighborMemory

if sys.argv[-1] == "detail":
    sys.argv.pop()
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # as torch does itself, where it is imported with the variable
STEPS, VOCABULARY, LENGTH = int(sys.argv[1]), 64, 16
TENSOR_PARALLEL = int(sys.argv[2]) if len(sys.argv) > 2 else 1
TIERS = [NeighborMemory(overlap=sys.argv[3] == "true")] if len(sys.argv) > 3 else []


@HPWrapper(checkpoint_manager=CheckpointManager(tiers=TIERS))
def main(caller: HPCallWrapper) -> None:
    cleanup.install()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(TENSOR_PARALLEL)
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        tensor_model_parallel_size=TENSOR_PARALLEL,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    replicas = parallel_state.get_data_parallel_group()
    torch.manual_seed(100 + replicas.rank())  # batches and dropout differ between the replicas
    position = torch.arange(LENGTH).expand(2, LENGTH)
    mask = torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None]
    same = dist.get_process_group_ranks(replicas) if TENSOR_PARALLEL > 1 else None
    training = PlainTraining(caller, [model], [optimizer], schedulers=[scheduler], group=same)
    for _ in training.steps(STEPS):
        tokens = torch.randint(VOCABULARY, (2, LENGTH))
        loss = model(tokens, position, mask, labels=tokens.roll(-1, 1)).mean()
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM, group=replicas)
                parameter.grad /= replicas.size()
        training.update(loss.item())
    dist.barrier()


main()
