"""The script of all trainers of the demo but NeMo's: ``python -m checkpointless.testing.demo.script TRAINER``."""

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader

from checkpointless.inprocess import HPCallWrapper, HPWrapper
from checkpointless.integrations.torch import PlainTraining
from checkpointless.recovery import CheckpointManager, seed_data_workers
from checkpointless.system.environment import own_world_size
from checkpointless.testing.demo.corpus import TextWindows, english
from checkpointless.testing.demo.trainers import HEADS, LAYERS, MICRO_BATCH, MICRO_BATCHES
from checkpointless.transfer.transfer import MEMORY_BUDGET_BYTES

BYTES, WIDTH, SEQUENCE, SEED = 256, 64, 64, 1234
_LossFunction = Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, float]]]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trainer", choices=_TRAINERS)
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps")
    parser.add_argument("--dropout", type=float, default=0.0, help="in [0, 1)")
    parser.add_argument("--tensor", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--pipeline", type=int, default=1, help="pipeline-parallel size")
    parser.add_argument("--holders", type=int, default=2, help="ranks that hold each shard")
    parser.add_argument("--workers", type=int, default=0, help="workers of each data loader")
    parser.add_argument("--checksum", action="store_true", help="compare replicas before a recovery")
    parser.add_argument("--bucket-bytes", type=int, default=MEMORY_BUDGET_BYTES, help="buffers of a transfer")
    return parser.parse_args()


def main() -> None:
    options = _options()
    manager = CheckpointManager(enable_checksum=options.checksum, memory_budget_bytes=options.bucket_bytes)

    @HPWrapper(checkpoint_manager=manager)
    def block(caller: HPCallWrapper) -> None:
        _TRAINERS[options.trainer](caller, options)

    block()


# --- The model and its data, of torch's own modules ---------------------------------------------------------------


class _Block(torch.nn.Module):
    """Causal attention and a feed-forward network, each with a residual connection."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.before_attention, self.before_feed = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.mix, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)
        self.drop = torch.nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what comes out for ``x`` of shape (samples, tokens, WIDTH)."""
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.mix(self.before_attention(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.drop(self.out(attended.transpose(1, 2).flatten(-2)))
        return x + self.drop(self.down(F.gelu(self.up(self.before_feed(x)))))


class _ByteModel(torch.nn.Module):
    """A GPT that predicts the next byte."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.tokens, self.positions = torch.nn.Embedding(BYTES, WIDTH), torch.nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = torch.nn.ModuleList(_Block(dropout) for _ in range(LAYERS))
        self.head = torch.nn.Linear(WIDTH, BYTES)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of ``tokens`` (int64, of shape (samples, SEQUENCE)) and their ``labels``."""
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def _sharded(model: _ByteModel, mesh: Any, tensor: Any) -> _ByteModel:  # Any: of type DeviceMesh
    """Shard a model by FSDP2, and its feed-forward networks by tensor parallelism if that has several ranks."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model.blocks:
        if tensor.size() > 1:
            parallelize_module(block, tensor, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _optimizer(model: torch.nn.Module, steps: int) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def _corpus(steps: int, ranks: int) -> TextWindows:
    """Return as many samples as ``ranks`` data-parallel ranks need for ``steps`` optimizer steps."""
    return TextWindows(english(), SEQUENCE, steps * MICRO_BATCHES * MICRO_BATCH * ranks, SEED)


def _batches(
    caller: HPCallWrapper, options: argparse.Namespace, first: int, rank: int, ranks: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Return a data-parallel rank's microbatches from step ``first``: int64, of shape (MICRO_BATCH, SEQUENCE)."""
    samples = [
        [(micro * ranks + rank) * MICRO_BATCH + place for place in range(MICRO_BATCH)]
        for micro in range((first - 1) * MICRO_BATCHES, options.steps * MICRO_BATCHES)
    ]
    loader = DataLoader(
        _corpus(options.steps, ranks),
        batch_sampler=samples,
        num_workers=options.workers,
        generator=torch.Generator(),
    )
    seed_data_workers(loader, seed=SEED, rank=rank)
    iterator = iter(loader)
    if caller.faults is not None and options.workers:
        caller.faults.batches = lambda: iterator
    return iterator


# --- The trainers -------------------------------------------------------------------------------------------------


def _loop(caller: HPCallWrapper, options: argparse.Namespace) -> None:
    """Train in a loop with torch's DDP, or with FSDP2 and replicas (HSDP), also with tensor parallelism."""
    dist.init_process_group("gloo")
    caller.enter_phase("init", caller.high_water)
    rank, ranks = dist.get_rank() // options.tensor, dist.get_world_size() // options.tensor
    torch.manual_seed(SEED)
    model: Any = _ByteModel(options.dropout)
    if options.trainer == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        shape, names = (options.holders, ranks // options.holders, options.tensor), ("replicate", "shard", "tensor")
        mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = _sharded(model, mesh["replicate", "shard"], mesh["tensor"])
    optimizer, scheduler = _optimizer(model, options.steps)
    torch.manual_seed(SEED + rank)  # a tensor-parallel group has the same batches and the same dropout
    training = PlainTraining(caller, [model], [optimizer], schedulers=[scheduler])
    batches = None
    for step in training.steps(options.steps):
        if batches is None:
            batches = _batches(caller, options, step, rank, ranks)
        total = 0.0
        for micro in range(1, MICRO_BATCHES + 1):
            caller.enter_phase("data", step)
            batch = next(batches)
            caller.enter_phase("forward", step)
            with nullcontext() if options.trainer != "ddp" or micro == MICRO_BATCHES else model.no_sync():
                loss = model(batch["tokens"], batch["labels"]) / MICRO_BATCHES
                caller.enter_phase("backward", step)
                loss.backward()
            total += loss.item()
        if options.tensor == 1:  # torch does not clip parameters of different meshes together
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        training.update(total)
    dist.barrier()


def _lightning(caller: HPCallWrapper, options: argparse.Namespace) -> None:
    """Train with Lightning and one of its own strategies, DDP or FSDP2 with replicas (HSDP)."""
    import lightning.pytorch as pl

    from checkpointless.strategies import CheckpointlessDDPStrategy, CheckpointlessModelParallelStrategy

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.gpt: Any = None

        def configure_model(self) -> None:
            if self.gpt is None:
                self.gpt, mesh = _ByteModel(options.dropout), self.device_mesh
                if mesh is not None:
                    _sharded(self.gpt, mesh["replicate", "shard"], mesh["tensor_parallel"])

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.gpt(batch["tokens"], batch["labels"])
            return loss

        def configure_optimizers(self) -> Any:
            optimizer, scheduler = _optimizer(self, options.steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    is_sharded, ranks = options.trainer == "lightning-hsdp", own_world_size()
    strategy: Any = CheckpointlessDDPStrategy()
    if is_sharded:
        strategy = CheckpointlessModelParallelStrategy(
            data_parallel_size=ranks // options.tensor,
            tensor_parallel_size=options.tensor,
            replicas=options.holders,
        )
    pl.seed_everything(SEED, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy=strategy,
        max_steps=options.steps,
        accumulate_grad_batches=MICRO_BATCHES,
        gradient_clip_val=None if is_sharded else 1.0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    samples = _corpus(options.steps, ranks)
    trainer.fit(Model(), DataLoader(samples, MICRO_BATCH, shuffle=True, num_workers=options.workers))


def _megatron(caller: HPCallWrapper, options: argparse.Namespace) -> None:
    """Train with Megatron-core's model, DDP and distributed optimizer in a loop."""
    from checkpointless.integrations.megatron.training import MegatronTraining

    MegatronTraining.prepare()
    from megatron.core import parallel_state as groups
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    dist.init_process_group("gloo")
    caller.enter_phase("init", caller.high_water)
    groups.initialize_model_parallel(
        options.tensor, options.pipeline, num_distributed_optimizer_instances=options.holders
    )
    torch.manual_seed(SEED)
    model_parallel_cuda_manual_seed(SEED)
    rank, ranks = groups.get_data_parallel_rank(), groups.get_data_parallel_world_size()
    global_batch = MICRO_BATCH * MICRO_BATCHES * ranks
    init_num_microbatches_calculator(dist.get_rank(), None, global_batch, MICRO_BATCH, ranks)
    model, optimizer = _megatron_model(options)
    training, forward_backward = MegatronTraining(caller, [model], optimizer), get_forward_backward_func()
    batches = None
    for step in training.steps(options.steps):
        if batches is None:
            batches = _batches(caller, options, step, rank, ranks)
        losses = forward_backward(
            forward_step_func=partial(_megatron_step, caller, step),
            data_iterator=batches,
            model=[model],
            num_microbatches=MICRO_BATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        training.update(sum(each["loss"] for each in losses) / MICRO_BATCHES)
    dist.barrier()


def _megatron_model(options: argparse.Namespace) -> tuple[Any, Any]:
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        hidden_dropout=options.dropout,
        attention_dropout=options.dropout,
        tensor_model_parallel_size=options.tensor,
        pipeline_model_parallel_size=options.pipeline,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    ends = {
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
    }
    gpt: Any = GPTModel(config, get_gpt_layer_local_spec(), BYTES, SEQUENCE, **ends)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True, num_distributed_optimizer_instances=options.holders
    )
    model = DistributedDataParallel(config, ddp, gpt)
    asked = OptimizerConfig(lr=1e-2, weight_decay=0.01, clip_grad=1.0, use_distributed_optimizer=True)
    return model, get_megatron_optimizer(asked, [model])


def _megatron_step(
    caller: HPCallWrapper, step: int, batches: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module
) -> tuple[torch.Tensor, _LossFunction]:
    """Compute the outputs of a microbatch, and return them with the function of their loss."""
    caller.enter_phase("data", step)
    batch = next(batches)
    caller.enter_phase("forward", step)
    position = torch.arange(SEQUENCE).expand(MICRO_BATCH, SEQUENCE)
    mask = torch.ones(SEQUENCE, SEQUENCE).triu(1).bool()[None, None]
    output: torch.Tensor = model(batch["tokens"], position, mask, labels=batch["labels"])
    output.register_hook(lambda _: caller.enter_phase("backward", step))

    def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        loss = output.float().mean()
        return loss, {"loss": float(loss.detach())}

    return output, loss_of


_TRAINERS: dict[str, Callable[[HPCallWrapper, argparse.Namespace], None]] = {
    "ddp": _loop,
    "hsdp": _loop,
    "megatron": _megatron,
    "lightning-ddp": _lightning,
    "lightning-hsdp": _lightning,
}

if __name__ == "__main__":
    main()
