"""Count parameters, look at a recipe and measure what state takes, in a rank of the tests of recipes."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from checkpointless.recipes import counting, runner
from checkpointless.recipes.layout import layout_of
from checkpointless.recipes.settings import RecipeError, load, parameters


def count(recipe: str, overrides: list[str] | None = None) -> Any:
    """Return the parameters on each GPU of every pipeline stage at the published size, or what is wrong."""
    for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"):
        os.environ.pop(name, None)
    config = load(recipe, overrides or ())
    try:
        counted = counting.count(config, layout_of(config))
    except RecipeError as error:
        return f"RecipeError: {error}"
    return counted if isinstance(counted, str) else [asdict(stage) for stage in counted]


def unknown_names(recipe: str) -> list[str]:
    """Return the `_target_`s of a recipe that do not exist, and the keys that theirs does not take."""
    wrong: list[str] = []

    def visit(node: Any, path: str) -> None:
        if isinstance(node, list):
            for index, value in enumerate(node):
                visit(value, f"{path}[{index}]")
        if not isinstance(node, dict):
            return
        target = node.get("_target_")
        if target is not None:
            try:
                known = parameters(target)
            except RecipeError as error:
                wrong.append(str(error))
            else:
                wrong.extend(f"{path}.{key}: {target}" for key in node if known and key not in {*known, "_target_"})
        for key, value in node.items():
            visit(value, f"{path}.{key}")

    visit(OmegaConf.to_container(load(recipe), resolve=True), recipe)
    return wrong


def plain(recipe: str) -> dict[str, str]:
    """Build a tiny recipe without its `checkpointless:` block, and name its strategy and the callbacks' modules."""
    config = load(recipe)
    del config.checkpointless
    runner.prepare_process()
    job = runner.build(config)
    return {
        "strategy": f"{type(job.trainer.strategy).__module__}.{type(job.trainer.strategy).__qualname__}",
        "callbacks": " ".join(type(callback).__module__ for callback in job.trainer.callbacks),
    }


def measure(overrides: list[str]) -> dict[str, int]:
    """Train a step of the tiny GPT; return the bytes of parameters, gradients and optimizer state on this rank."""
    from megatron.core import parallel_state

    config = load("tiny_gpt_cpu", ["checkpointless.enabled=false", "trainer.max_steps=1", *overrides])
    trainer = runner.fit(config)
    strategy: Any = trainer.strategy
    optimizer: Any = trainer.optimizers[0].mcore_optimizer
    chunks = strategy.megatron_parallel
    buffers = [buffer for chunk in chunks for buffer in chunk.module.buffers]
    held: dict[int, torch.Tensor] = {}
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        for state in each.optimizer.state.values():
            held |= {
                tensor.data_ptr(): tensor for tensor in state.values() if torch.is_tensor(tensor) and tensor.dim()
            }
        for group in getattr(each, "shard_fp32_from_float16_groups", []):
            held |= {tensor.data_ptr(): tensor for tensor in group}
    result = {
        "parameters": sum(_bytes(parameter) for chunk in chunks for parameter in chunk.parameters()),
        "gradients": sum(_bytes(buffer.grad_data) for buffer in buffers),
        "optimizer": sum(map(_bytes, held.values())),
    }
    dist.destroy_process_group()
    parallel_state.destroy_model_parallel()
    return result


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
