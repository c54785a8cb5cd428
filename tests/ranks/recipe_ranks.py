"""Count parameters and look at a recipe, in a rank of the tests of recipes."""

import os
from collections.abc import Sequence
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from checkpointless.recipes import runner
from checkpointless.recipes.checks import layout_of
from checkpointless.recipes.runner import make
from checkpointless.recipes.settings import RecipeError, _parameters, load
from checkpointless.system.layout import Layout
from tests.unit.megatron_groups import as_rank

# Kernels that a model's configuration asks for and that change no parameter. The model is built from Megatron's own
# layers, which have the same parameters as TransformerEngine's and can be built where that is not installed.
_KERNELS = (
    "apply_rope_fusion",
    "bias_activation_fusion",
    "gradient_accumulation_fusion",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "persist_layer_norm",
)


def count(recipe: str) -> list[tuple[int, int, int]]:
    """Count the parameters of each pipeline stage: on all of its GPUs, on one of them, and those of one that train.

    NeMo and Megatron build the part of one rank of each stage at the published world size, on torch's meta device,
    in process groups without connections. Tensor- and expert-parallel ranks of one stage hold equal numbers.
    """
    for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"):
        os.environ.pop(name, None)
    config = load(recipe)
    layout = layout_of(config)
    runner.prepare_process()
    strategy: Any = make(config, "strategy")
    return [_stage(config, layout, strategy, number) for number in range(layout.pipeline)]


def _stage(config: DictConfig, layout: Layout, strategy: Any, number: int) -> tuple[int, int, int]:
    from megatron.core import parallel_state

    found: list[nn.Parameter] = []
    apart = layout.tensor * layout.context if layout.pipeline_before_data else layout.world_size // layout.pipeline
    with as_rank(layout, number * apart):
        for chunk in range(layout.virtual_pipeline):
            if layout.virtual_pipeline > 1:
                parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
            found += _build(config, strategy, chunk).parameters()
    expert = [each for each in found if not getattr(each, "allreduce", True)]  # Megatron's own mark
    dense = [each for each in found if getattr(each, "allreduce", True)]
    once = [each for each in dense if not (number and getattr(each, "shared_embedding", False))]  # also in stage 0
    whole = _whole(once, layout.tensor) + _whole(expert, layout.expert_tensor) * layout.expert
    trained = sum(each.numel() for each in found if each.requires_grad)
    return whole, sum(each.numel() for each in found), trained


def _whole(found: Sequence[nn.Parameter], tensor: int) -> int:
    """Count the elements over all tensor-parallel ranks, which split the parameters that Megatron has marked."""
    return sum(each.numel() * (tensor if getattr(each, "tensor_model_parallel", False) else 1) for each in found)


def _build(config: DictConfig, strategy: Any, chunk: int) -> nn.Module:
    """Build one rank's part of the model on the meta device, with the adapters that training would add."""
    from nemo.collections.llm.gpt.model.base import default_layer_spec, local_layer_spec
    from nemo.lightning._strategy_lib import set_model_parallel_attributes

    model: Any = make(_without_kernels(config), "model", tokenizer=None)
    set_model_parallel_attributes(model, strategy.parallelism)
    settings = model.config
    settings.use_cpu_initialization = True  # weights on torch's default device, not on the current GPU
    if settings.transformer_layer_spec is default_layer_spec:
        settings.transformer_layer_spec = local_layer_spec
    # Neither changes a parameter, and Megatron's own layers refuse them.
    settings.sequence_parallel, settings.context_parallel_size = False, 1
    with torch.device("meta"):
        model.module = settings.configure_model(model.tokenizer, vp_stage=chunk)
        if OmegaConf.select(config, "peft") is not None:
            peft: Any = make(config, "peft")
            runner.prepare_process()  # NeMo's LoRA needs the CPU platform as well, if that is asked for
            model.freeze()  # as NeMo's PEFT callback does when training begins
            model.walk(peft.transform)
    built: nn.Module = model.module
    return built


def _without_kernels(config: DictConfig) -> DictConfig:
    target = OmegaConf.select(config, "model.config._target_")
    if target is None:
        return config
    known = _parameters(target)
    plain = config.copy()
    plain.model.config.update({kernel: False for kernel in _KERNELS if kernel in known})
    return plain


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
                known = _parameters(target)
            except RecipeError as error:
                wrong.append(str(error))
            else:
                wrong.extend(f"{path}.{key}: {target}" for key in node if known and key not in {*known, "_target_"})
        for key, value in node.items():
            visit(value, f"{path}.{key}")

    visit(OmegaConf.to_container(load(recipe), resolve=True), recipe)
    return wrong


def plain(recipe: str) -> dict[str, str]:
    config = load(recipe)
    del config.checkpointless
    runner.prepare_process()
    job = runner.build(config)
    return {
        "strategy": f"{type(job.trainer.strategy).__module__}.{type(job.trainer.strategy).__qualname__}",
        "callbacks": " ".join(type(callback).__module__ for callback in job.trainer.callbacks),
    }
