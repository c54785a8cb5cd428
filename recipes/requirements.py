"""Checks that the machine has what a recipe needs beyond its ranks, and says in one line what is missing.

Megatron-core and NeMo say so, too, but only when the model is built, in every rank, with an error that looks like a
fault.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, fields

from omegaconf import DictConfig, OmegaConf

from checkpointless.layout import Layout
from checkpointless.recipes.settings import RecipeError, checkpointless_enabled, needs_gpu

_LOCAL_LAYERS = "nemo.collections.llm.gpt.model.base.local_layer_spec"


@dataclass(frozen=True)
class Machine:
    """Which optional packages are installed where the recipe is to be trained.

    Attributes:
        transformer_engine: whether NVIDIA's TransformerEngine is installed.
        apex: whether NVIDIA's apex is installed.
        grouped_gemm: whether the CUDA kernels for Megatron's ``moe_grouped_gemm`` are installed.
    """

    transformer_engine: bool = False
    apex: bool = False
    grouped_gemm: bool = False

    @classmethod
    def here(cls) -> Machine:
        """Describe the machine that this process runs on."""
        return cls(**{field.name: importlib.util.find_spec(field.name) is not None for field in fields(cls)})


def check_requirements(config: DictConfig, layout: Layout, machine: Machine) -> None:
    """Raise if the recipe needs what is not installed, or keeps state that checkpointless cannot take along.

    Args:
        config: the recipe.
        layout: the layout of its ranks.
        machine: the machine that the recipe is to be trained on.

    Raises:
        RecipeError: a requirement is not met; the message is one line that says what to set.
    """

    def on(key: str) -> bool:
        return not OmegaConf.is_missing(config, key) and bool(OmegaConf.select(config, key, default=False))

    layers = OmegaConf.select(config, "model.config.transformer_layer_spec.path", default=None)
    local = layers == _LOCAL_LAYERS or (layers is None and not machine.transformer_engine)
    experts = OmegaConf.select(config, "model.config.num_moe_experts", default=None)
    offload = on("optim.config.optimizer_cpu_offload")
    needs = [
        (
            layout.context > 1 and local,
            "context parallelism needs TransformerEngine: set strategy.context_parallel_size=1",
        ),
        (
            on("strategy.sequence_parallel") and layout.tensor > 1 and local and not machine.apex,
            "sequence parallelism needs TransformerEngine or apex: set strategy.sequence_parallel=false",
        ),
        (
            bool(experts) and on("model.config.moe_grouped_gemm") and local and not machine.grouped_gemm,
            "the grouped GEMM needs TransformerEngine or grouped_gemm: set model.config.moe_grouped_gemm=false",
        ),
        (
            on("optim.config.use_precision_aware_optimizer") and not machine.transformer_engine,
            "the precision-aware optimizer needs TransformerEngine: "
            "set optim.config.use_precision_aware_optimizer=false",
        ),
        (
            offload and not needs_gpu(config),
            "an optimizer can be offloaded to the CPU from GPUs only: set optim.config.optimizer_cpu_offload=false",
        ),
        (
            offload and checkpointless_enabled(config),
            "checkpointless cannot take along what an optimizer that is offloaded to the CPU keeps for itself: "
            "set optim.config.optimizer_cpu_offload=false",
        ),
    ]
    for missing, message in needs:
        if missing:
            raise RecipeError(message)
