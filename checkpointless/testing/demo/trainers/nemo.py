"""NeMo's trainer: the recipe ``tiny_gpt_cpu``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from checkpointless.faults.chaos import NEMO
from checkpointless.testing.demo.trainers.trainer import NEMO_EXTRA, DemoError, Program, Task, Trainer, divide

RECIPE = "tiny_gpt_cpu"

#: Sizes of the recipe's model and batches; a test compares them with the recipe.
LAYERS, HEADS = 4, 4
RECIPE_MICRO_BATCH, GLOBAL_BATCH = 2, 16
EXPERTS = 4

_OVERRIDES = {
    "tp": "strategy.tensor_model_parallel_size",
    "pp": "strategy.pipeline_model_parallel_size",
    "ep": "strategy.expert_model_parallel_size",
    "cp": "strategy.context_parallel_size",
}


class NeMo(Trainer):
    """NeMo's Megatron strategy."""

    name = "nemo"
    what = "A NeMo GPT"
    keys = tuple(_OVERRIDES)
    needs = ("nemo", "hydra")
    install = NEMO_EXTRA
    scope = NEMO

    def check(self, nproc: int, layout: Mapping[str, int]) -> None:
        """Check that ``nproc`` ranks can be laid out as asked, and share the recipe's model."""
        tensor, pipeline, expert, context = (layout.get(key, 1) for key in self.keys)
        for key, what, number in (
            ("tp", "attention heads", HEADS),
            ("pp", "layers", LAYERS),
            ("ep", "experts", EXPERTS),
        ):
            if number % layout.get(key, 1):
                raise DemoError(
                    f"--layout {key}={layout[key]}: the model has {number} {what}, which {layout[key]} "
                    "cannot share: use 1, 2 or 4"
                )
        if context > 1:
            raise DemoError(
                f"--layout cp={context}: context parallelism needs TransformerEngine's attention, which CPU ranks "
                "do not have: leave it out"
            )
        if tensor > 1 and expert > 1:
            raise DemoError(
                f"--layout tp={tensor},ep={expert}: Megatron trains experts with tensor parallelism only with "
                "sequence parallelism, which its own layers do not have on CPU ranks: use one of the two"
            )
        divide(nproc, tensor * pipeline, layout, 2 * expert)

    def prepare(self) -> None:
        """Install the CPU platform, and keep NeMo from the network."""
        from checkpointless.recipes import runner

        runner.prepare_process()

    def notes(self, task: Task) -> Sequence[str]:
        """Return that the optimizer has two replicas, and that a step takes more samples than the recipe says."""
        notes = ["two optimizer replicas"]
        if global_batch(task) != GLOBAL_BATCH:
            notes.append(
                f"a step takes {global_batch(task)} samples, not the recipe's {GLOBAL_BATCH}, so that every "
                "data-parallel rank has whole microbatches"
            )
        return notes

    def program(self, task: Task) -> Program:
        """Return the program that trains the recipe with the overrides of ``task``."""
        return Program("checkpointless.recipes.runner", (RECIPE, *overrides(task)))

    def preload(self) -> Sequence[str]:
        """Return the names of the modules that the recipe names."""
        from checkpointless.recipes.settings import load, modules

        return modules(load(RECIPE, ()))


def global_batch(task: Task) -> int:
    """Return the samples per step: the recipe's number, rounded up to whole microbatches for each rank."""
    ranks = task.nproc // (task.layout.get("tp", 1) * task.layout.get("pp", 1))
    return math.ceil(GLOBAL_BATCH / (RECIPE_MICRO_BATCH * ranks)) * RECIPE_MICRO_BATCH * ranks


def overrides(task: Task) -> tuple[str, ...]:
    """Return the overrides of the recipe for ``task``."""
    changed = [
        f"trainer.max_steps={task.steps}",
        f"model.config.hidden_dropout={task.dropout}",
        f"model.config.attention_dropout={task.dropout}",
    ]
    changed += [f"{_OVERRIDES[key]}={size}" for key, size in task.layout.items()]
    if global_batch(task) != GLOBAL_BATCH:
        changed.append(f"data.global_batch_size={global_batch(task)}")
    if task.holders != 2:
        changed.append(f"strategy.num_distributed_optimizer_instances={task.holders}")
    if task.layout.get("ep", 1) > 1:
        changed += [
            "model.config.num_moe_experts=4",
            "model.config.moe_router_topk=2",
            "model.config.moe_grouped_gemm=false",
            # Megatron-core 0.15 leaves the router's bias uninitialised, so the model has no biases.
            "model.config.add_bias_linear=false",
        ]
    if task.bucket_bytes is not None:
        changed.append(f"checkpointless.memory_budget_bytes={task.bucket_bytes}")
    if task.workers:
        changed.append(f"data.num_workers={task.workers}")
    if task.checksum:
        changed.append("checkpointless.enable_checksum=true")
    if task.checkpoint_every:
        changed += [
            "trainer.enable_checkpointing=true",
            "callbacks.checkpoint={_target_: nemo.lightning.pytorch.callbacks.ModelCheckpoint, "
            f"every_n_train_steps: {task.checkpoint_every}, save_last: true, save_top_k: -1, monitor: null, "
            "save_context_on_train_end: false}",
            f"log={{_target_: nemo.lightning.NeMoLogger, log_dir: '{task.checkpoints}', name: tiny_gpt}}",
            "resume={_target_: nemo.lightning.AutoResume, resume_if_exists: true, "
            "resume_ignore_no_checkpoint: true}",
        ]
    return tuple(changed)
